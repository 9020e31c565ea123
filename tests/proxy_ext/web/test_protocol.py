"""Connections to a proxy, byte by byte: heads have an end, and what is no HTTP an answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from proxy_ext.web import protocol as connections
from proxy_ext.web.protocol import BoundedProtocol
from tests.support.proxy import LIMIT, until

WAITS = "/waits"
"""A path that is answered once :data:`go_on` is set."""
go_on = asyncio.Event()
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def count(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the number of bytes that the body had."""
    size, more = 0, True
    while more:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    if scope["path"] == WAITS:
        await go_on.wait()
    body = b"%d" % size
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
async def server() -> AsyncIterator[uvicorn.Server]:
    go_on.clear()
    options = uvicorn.Config(
        count, port=0, http=BoundedProtocol, lifespan="off", access_log=False, log_config=None
    )
    server = uvicorn.Server(options)
    task = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    yield server
    server.should_exit = True
    await task


@pytest.fixture
def port(server: uvicorn.Server) -> int:
    return int(server.servers[0].sockets[0].getsockname()[1])


class Wire:
    """A connection to the server."""

    def __init__(self, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
        self.reader, self.writer = streams

    @classmethod
    async def to(cls, port: int) -> Wire:
        return cls(await asyncio.open_connection("127.0.0.1", port))

    def ask(self, path: bytes = b"/") -> None:
        self.writer.write(GET.replace(b"/ ", path + b" ", 1))

    async def status(self, path: bytes = b"/") -> bytes:
        """Ask for a path; return the status of the answer."""
        self.ask(path)
        head = await self.reader.readuntil(b"\r\n\r\n")
        return head.split(b" ")[1]

    def close(self) -> None:
        self.writer.transport.abort()


async def exchange(port: int, *parts: bytes) -> bytes:
    """Everything that comes back until the other side closes."""
    wire = await Wire.to(port)
    try:
        async with asyncio.timeout(LIMIT):
            for part in parts:
                wire.writer.write(part)
                await wire.writer.drain()
            return await wire.reader.read(-1)
    finally:
        wire.close()


async def test_a_bad_head_is_answered_with_an_error(port: int) -> None:
    for data in (
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"v" * 200_000,
        b"GET /" + b"a" * 200_000,
        b"GET / HTTP/1.1\r\n" + b"X: v\r\n" * 30_000,
    ):
        head, _, body = (await exchange(port, data)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 "), data[:40]
        assert json.loads(body)["error"]["code"] == "invalid_request", data[:40]


async def test_a_long_body_is_not_refused_as_a_long_head(port: int) -> None:
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 300000\r\n\r\n"
    last = GET.replace(b"Host", b"Connection: close\r\nHost")
    answer = await exchange(port, (head + b"x" * 300_000) * 2 + last)
    assert answer.count(b"300000") == 2
    assert answer.endswith(b"\r\n\r\n0")


async def test_a_head_must_come_in_time(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    begun = b"GET / HTTP/1.1\r\nX: "
    for before, part in ((b"", b""), (b"", begun), (GET, begun)):
        answer = await exchange(port, before, part)
        assert answer.count(b"200 OK") == (1 if before else 0)


async def test_bytes_that_come_during_an_answer_do_not_end_it(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the empty line that some clients send behind a body: no head must follow it."""
    got: list[bytes] = []
    heads: list[float] = []
    data_received, close_after = BoundedProtocol.data_received, BoundedProtocol.close_after

    def received(connection: BoundedProtocol, data: bytes) -> None:
        data_received(connection, data)
        got.append(data)

    def noted(connection: BoundedProtocol, seconds: float) -> None:
        heads.append(seconds)
        close_after(connection, seconds)

    monkeypatch.setattr(BoundedProtocol, "data_received", received)
    monkeypatch.setattr(BoundedProtocol, "close_after", noted)
    wire = await Wire.to(port)
    wire.ask(WAITS.encode())
    await until(lambda: len(got) == 1)
    wire.writer.write(b"\r\n")
    await until(lambda: len(got) == 2)
    assert heads == [75.0], "only the first head had to come in time"
    go_on.set()
    async with asyncio.timeout(LIMIT):
        assert b"200 OK" in await wire.reader.readuntil(b"\r\n\r\n")
    wire.close()


async def test_the_body_of_a_refused_request_has_an_end(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer may be sent already: whoever goes on sending is disconnected."""
    monkeypatch.setattr(connections, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(BoundedProtocol, "body_seconds", 0.1)
    wire = await Wire.to(port)
    wire.writer.write(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 40000\r\n\r\n")
    async with asyncio.timeout(LIMIT):
        while not wire.reader.at_eof() and not wire.writer.is_closing():
            wire.writer.write(b"a")
            await asyncio.sleep(0.02)
    wire.close()


async def test_connections_above_the_bound_are_served_health_alone(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedProtocol.limit, "most", BoundedProtocol.limit.open + 1)
    first = await Wire.to(port)
    async with asyncio.timeout(LIMIT):
        assert await first.status() == b"200"
        for path, status in ((b"/v1/models", b" 503 "), (b"/healthz", b" 200 ")):
            other = await Wire.to(port)
            other.ask(path)
            answer = await other.reader.read()
            assert status in answer.split(b"\r\n")[0]
            if status == b" 503 ":
                assert b"retry-after: 2" in answer.lower() and b"too_many_connections" in answer
            other.close()
        assert await first.status() == b"200", "those that were there before are served on"
    first.close()


async def test_far_above_the_bound_the_longest_idle_connections_are_closed(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedProtocol.limit, "most", BoundedProtocol.limit.open + 1)
    used = await Wire.to(port)
    async with asyncio.timeout(LIMIT):
        assert await used.status() == b"200"
        wires = [await Wire.to(port) for _ in range(600)]
        ends = [asyncio.create_task(wire.reader.read()) for wire in wires]
        await asyncio.wait(ends[:500])
        assert all(end.result().startswith(b"HTTP/1.1 503 ") for end in ends[:500])
        for _ in range(50):
            health = await Wire.to(port)
            assert await health.status(b"/healthz") == b"200"
            health.close()
        assert await used.status() == b"200"
    for end in ends:
        end.cancel()
    for wire in (used, *wires):
        wire.close()
    await until(lambda: BoundedProtocol.limit.open < 2)


async def test_answers_under_way_are_not_cut_off_for_a_new_connection(
    server: uvicorn.Server, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Further connections are refused."""
    before = BoundedProtocol.limit.open
    connections: set[Any] = server.server_state.connections
    monkeypatch.setattr(BoundedProtocol.limit, "most", before + 40)
    wires = [await Wire.to(port) for _ in range(72)]
    head = b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n\r\n"
    for number, wire in enumerate(wires):
        wire.writer.write(b"POST " + (b"/" if number < 40 else b"/healthz") + head)
    async with asyncio.timeout(LIMIT):
        await until(lambda: sum(one.cycle is not None for one in connections) == 72)
        for _ in range(20):
            assert (await exchange(port)).startswith(b"HTTP/1.1 503 ")
        for wire in wires:
            wire.writer.write(b"a")
            assert b" 200 " in await wire.reader.readuntil(b"\r\n\r\n")
            wire.close()
