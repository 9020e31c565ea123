"""The aiohttp server of router and engine: its bounds, and what it makes of malformed HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from any_agent.errors import AnyAgentError
from any_agent.runtime import bounded_server, open_files
from any_agent.runtime.bounded_server import BoundedRunner, is_crowded, read_body, require_room

LIMIT = 60.0
GET = b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nab"


async def _before(_: web.Request) -> None:
    """Keep a request waiting, where a test replaces it."""


async def _handle(request: web.Request) -> web.Response:
    await _before(request)
    try:
        require_room(request)
        body = await read_body(request, 8, 0.2)
    except AnyAgentError as error:
        response = web.json_response(error.body(), status=error.status, headers=error.headers())
    else:
        response = web.Response(body=body)
    if is_crowded(request):
        response.force_close()
    return response


async def _fail(_: web.Request) -> web.Response:
    raise RuntimeError("the secret of the handler")


@asynccontextmanager
async def _running(most: int, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    """Give the port of a server that takes so many connections."""
    monkeypatch.setattr(open_files, "connections_for_descriptors", lambda: most)
    app = web.Application()
    app.router.add_get("/bug", _fail)
    app.router.add_route("*", "/{path:.*}", _handle)
    runner = BoundedRunner(app, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with asyncio.timeout(LIMIT):
            yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def _sent(port: int, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection on which this is sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    return reader, writer


async def _answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, Any]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.partition("content-length: ")[2].split("\r\n")[0])
    body = await reader.readexactly(length)
    return int(head.split()[1]), json.loads(body) if body.startswith(b"{") else {"text": body}


async def test_connections_above_the_bound_are_for_health(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _running(1, monkeypatch) as port:
        first = await _sent(port, GET % b"/")
        assert (await _answer(first[0]))[0] == 200
        for path, status in ((b"/model_info", 503), (b"/health", 200)):
            reader, writer = await _sent(port, GET % path)
            got, told = await _answer(reader)
            assert got == status
            assert status == 200 or told["error"]["code"] == "too_many_connections"
            assert await reader.read() == b"", "it is for one request"
            writer.close()
        # One that was there before is served on.
        first[1].write(GET % b"/")
        assert (await _answer(first[0]))[0] == 200
        first[1].close()


async def test_far_above_the_bound_the_longest_idle_connections_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with _running(1, monkeypatch) as port:
        used = await _sent(port, GET % b"/")
        assert (await _answer(used[0]))[0] == 200
        half_a_head = await _sent(port, b"GET / HT")
        wires = [await asyncio.open_connection("127.0.0.1", port) for _ in range(600)]
        assert (await half_a_head[0].read()).startswith(b"HTTP/1.1 503 ")
        ends = [asyncio.create_task(reader.read()) for reader, _ in wires]
        await asyncio.wait(ends[:500])
        assert all(end.result().startswith(b"HTTP/1.1 503 ") for end in ends[:500])
        for _ in range(50):
            reader, writer = await _sent(port, GET % b"/health")
            assert (await _answer(reader))[0] == 200
            writer.close()
        # One that had a request goes on, as long as others have had none.
        used[1].write(GET % b"/")
        assert (await _answer(used[0]))[0] == 200
        for end, (_, writer) in zip(ends, wires, strict=True):
            end.cancel()
            writer.close()
        for _, writer in (used, half_a_head):
            writer.close()


async def test_a_crowd_that_comes_at_once_closes_no_connection_that_was_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with _running(1, monkeypatch) as port:
        used = await _sent(port, GET % b"/")
        assert (await _answer(used[0]))[0] == 200
        # The server, in this thread, accepts all of them in one turn of its loop.
        crowd = [socket.create_connection(("127.0.0.1", port), LIMIT) for _ in range(100)]
        assert await asyncio.to_thread(crowd[0].recv, 13) == b"HTTP/1.1 503 "
        used[1].write(GET % b"/")
        assert (await _answer(used[0]))[0] == 200
        for wire in crowd:
            wire.close()
        used[1].close()


async def test_answers_under_way_are_not_cut_off_for_a_new_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Further connections are refused."""
    hung: list[asyncio.Future[None]] = []

    async def hang(_: web.Request) -> None:
        hung.append(asyncio.get_running_loop().create_future())
        await hung[-1]

    monkeypatch.setattr(f"{__name__}._before", hang)
    async with _running(1, monkeypatch) as port:
        wires = []
        for number in range(33):
            wires.append(await _sent(port, GET % b"/health"))
            while len(hung) <= number:  # noqa: ASYNC110
                await asyncio.sleep(0)
        for _ in range(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 503 ") and b"Retry-After" in answer
            writer.close()
        for one in hung:
            one.set_result(None)
        for reader, writer in wires:
            assert (await _answer(reader))[0] == 200
            writer.close()


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: "], ids=["nothing", "half a head"])
async def test_a_request_head_that_never_ends_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(bounded_server, "KEEPALIVE", 0.1)
    async with _running(8, monkeypatch) as port:
        reader, writer = await _sent(port, sent)
        assert await reader.read() == b""
        writer.close()


async def test_a_request_body_that_is_too_slow_or_too_long_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with _running(8, monkeypatch) as port:
        for part_timeout, says in ((60.0, "this server's time limit (0.2 s)"), (0.1, "no part")):
            monkeypatch.setattr(bounded_server, "PART_TIMEOUT", part_timeout)
            reader, writer = await _sent(port, POST)
            status, told = await _answer(reader)
            assert (status, told["error"]["code"]) == (400, "body_timeout")
            assert says in told["error"]["message"]
            writer.close()
        reader, writer = await _sent(port, POST + b"cde")
        assert await _answer(reader) == (200, {"text": b"abcde"})
        writer.write(POST.replace(b"5", b"9") + b"cdefghi")
        assert (await _answer(reader))[0] == 413
        writer.close()


@pytest.mark.parametrize(
    "sent",
    [b"\x16\x03\x01 no http\r\n\r\n", b"GET / HTTP/1.1\r\na: " + 99_999 * b"k" + b"\r\n\r\n"],
    ids=["no HTTP", "a long head"],
)
async def test_malformed_http_is_answered_and_not_logged(
    sent: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Anybody can send it, as often as he likes, and with anything in it."""
    async with _running(8, monkeypatch) as port:
        reader, writer = await _sent(port, sent)
        status, told = await _answer(reader)
        assert (status, told["error"]["code"]) == (400, "invalid_request")
        assert "128 headers" in told["error"]["message"]
        assert await reader.read() == b""
        writer.close()
    assert not [record for record in caplog.records if record.levelno >= logging.INFO]


async def test_an_unexpected_error_is_logged_and_hidden_from_the_client(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with _running(8, monkeypatch) as port:
        reader, writer = await _sent(port, GET % b"/bug")
        status, told = await _answer(reader)
        assert (status, told["error"]["code"]) == (500, "internal_error")
        assert "secret" not in json.dumps(told) and "secret" in caplog.text
        writer.close()
