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

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def count(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the number of bytes that the body had."""
    size, more = 0, True
    while more:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    body = b"%d" % size
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
async def port() -> AsyncIterator[int]:
    options = uvicorn.Config(
        count, port=0, http=BoundedProtocol, lifespan="off", access_log=False, log_config=None
    )
    server = uvicorn.Server(options)
    task = asyncio.create_task(server._serve(None))
    await until(lambda: server.started)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await task


async def exchange(port: int, *parts: bytes) -> bytes:
    """Everything that comes back until the other side closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(LIMIT):
            for part in parts:
                writer.write(part)
                await writer.drain()
            return await reader.read(-1)
    finally:
        writer.transport.abort()


def refused(answer: bytes) -> bool:
    head, _, body = answer.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    return head.startswith(b"HTTP/1.1 400 ") and error["code"] == "invalid_request"


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"v" * 200_000,
        b"GET /" + b"a" * 200_000,
        b"GET / HTTP/1.1\r\n" + b"X: v\r\n" * 30_000,
    ],
    ids=["nonsense", "length", "header", "path", "headers"],
)
async def test_bad_heads(port: int, data: bytes) -> None:
    assert refused(await exchange(port, data))


async def test_a_long_body_is_no_long_head(port: int) -> None:
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 300000\r\n\r\n"
    last = GET.replace(b"Host", b"Connection: close\r\nHost")
    answer = await exchange(port, (head + b"x" * 300_000) * 2 + last)
    assert answer.count(b"300000") == 2
    assert answer.endswith(b"\r\n\r\n0")


@pytest.mark.parametrize(
    ("before", "part"),
    [(b"", b""), (b"", b"GET / HTTP/1.1\r\nX: "), (GET, b"GET / HTTP/1.1\r\nX: ")],
    ids=["silent", "begun", "the next one"],
)
async def test_a_head_must_come(
    port: int, monkeypatch: pytest.MonkeyPatch, before: bytes, part: bytes
) -> None:
    monkeypatch.setattr(connections, "_HEAD_SECONDS", 0.2)
    answer = await exchange(port, before, part)
    assert answer.count(b"200 OK") == (1 if before else 0)


async def test_a_body_may_take_its_time(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[asyncio.TimerHandle | None] = []
    expect = BoundedProtocol._expect_head

    def noted(connection: BoundedProtocol) -> None:
        expect(connection)
        timers.append(connection._timer)

    monkeypatch.setattr(BoundedProtocol, "_expect_head", noted)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\nab")
    await until(lambda: timers and all(timer and timer.cancelled() for timer in timers))
    writer.write(b"cd")
    async with asyncio.timeout(LIMIT):
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
    writer.transport.abort()
