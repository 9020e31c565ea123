"""The SDK's HTTP client against a server that says exactly what a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeAlias

import httpx
import pytest

from any_agent.client import aiohttp_transport as many_requests
from any_agent.client.aiohttp_transport import AiohttpTransport, Response

Handler: TypeAlias = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nX-A: 1\r\n\r\nok"


class Server:
    """Answers each connection by a function; counts them."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.connections = 0
        self.requests: list[bytes] = []
        self.asked = asyncio.Event()
        self.url = ""

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[Server]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            await self._handler(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()

    async def request(self, reader: asyncio.StreamReader) -> bytes:
        head = await reader.readuntil(b"\r\n\r\n")
        length = 0
        for line in head.split(b"\r\n"):
            if line.lower().startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        self.requests.append(head + await reader.readexactly(length))
        self.asked.set()
        return self.requests[-1]


Saying: TypeAlias = Callable[..., Awaitable[Server]]


@pytest.fixture
async def saying() -> AsyncIterator[Saying]:
    """A server that answers every request with these parts, one after the other."""
    async with AsyncExitStack() as stack:

        async def make(*parts: bytes, close: bool = False) -> Server:
            async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                while True:
                    await server.request(reader)
                    for part in parts:
                        writer.write(part)
                        await writer.drain()
                        await asyncio.sleep(0.001)
                    if close:
                        return

            server = Server(handler)
            return await stack.enter_async_context(server.serve())

        yield make


@pytest.fixture
async def http() -> AsyncIterator[AiohttpTransport]:
    http = AiohttpTransport(timeout=5.0, bounded=True)
    yield http
    await http.aclose()


async def ask(
    http: AiohttpTransport, url: str, method: str = "GET", content: str | None = None
) -> Response:
    return await http.request(method, url, content=content, headers={"a": "b"}, timeout=5.0)


async def test_one_connection_for_one_request_after_another(
    saying: Saying, http: AiohttpTransport
) -> None:
    server = await saying(OK)
    for _ in range(3):
        answer = await ask(http, f"{server.url}/x?y=1", "POST", "{}")
        assert (answer.status_code, answer.content, answer.headers["x-a"]) == (200, b"ok", "1")
    assert server.connections == 1
    head, _, body = server.requests[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /x?y=1 HTTP/1.1\r\n") and b"\r\na: b\r\n" in head
    assert body == b"{}"


PIECES: list[tuple[list[bytes], bytes]] = [
    ([OK[:5], OK[5:40], OK[40:-1], OK[-1:]], b"ok"),
    ([b"HTTP/1.1 100 Continue\r\n\r\n" + OK], b"ok"),
    ([b"HTTP/1.1 204 No Content\r\n\r\n"], b""),
    (
        [
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nab",
            b"c\r\n1",
            b"0\r\n0123456789abcdef\r",
            b"\n0\r\n\r",
            b"\n",
        ],
        b"abc0123456789abcdef",
    ),
]


async def test_answers_in_pieces_are_whole(saying: Saying, http: AiohttpTransport) -> None:
    for parts, body in PIECES:
        server = await saying(*parts)
        for _ in range(2):
            assert (await ask(http, server.url)).content == body
        assert server.connections == 1


async def test_connections_that_the_server_ends_are_not_used_again(
    saying: Saying, http: AiohttpTransport
) -> None:
    for said in (
        b"HTTP/1.1 200 OK\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok",
        OK,
    ):
        server = await saying(said, close=True)
        for _ in range(2):
            assert (await ask(http, server.url)).content == b"ok"
            await asyncio.sleep(0.05)
        assert server.connections == 2
    # An answer that breaks off is none.
    for said in (
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-length: 20\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nok",
    ):
        server = await saying(said, close=True)
        with pytest.raises(httpx.ReadError):
            await ask(http, server.url)


async def test_what_is_no_answer_is_an_error_and_not_asked_for_again(
    saying: Saying, http: AiohttpTransport
) -> None:
    for said in (
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 yes\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: two\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n",
        b"x" * 70_000,
    ):
        server = await saying(said)
        for _ in range(2):
            with pytest.raises(httpx.RemoteProtocolError):
                await ask(http, server.url)
        assert server.connections == 2, said


async def test_what_is_no_url_or_header_is_refused(saying: Saying, http: AiohttpTransport) -> None:
    for url in ("", "ftp://x", "http://", "http://h:port", "http:///x"):
        with pytest.raises((httpx.UnsupportedProtocol, httpx.InvalidURL)):
            await ask(http, url)
    server = await saying(OK)
    with pytest.raises(httpx.LocalProtocolError):
        await http.request("GET", server.url, headers={"a": "b\r\nc: d"}, timeout=1.0)
    assert not server.requests


async def test_connections_are_few_however_many_ask(
    http: AiohttpTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those that wait there leave some to the others."""
    monkeypatch.setattr(many_requests, "MAX_CONNECTIONS", 4)
    monkeypatch.setattr(many_requests, "MAX_POLLS", 2)
    few = AiohttpTransport(timeout=5.0, bounded=True)
    answered = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            if b"GET /poll" in await server.request(reader):
                await answered.wait()
            writer.write(OK)

    server = Server(handler)
    async with server.serve():
        polls = [
            asyncio.create_task(few.request("GET", f"{server.url}/poll", headers={}, timeout=9.0))
            for _ in range(8)
        ]
        for _ in range(3):
            await asyncio.gather(*(ask(few, server.url) for _ in range(20)))
        assert sum(b"GET /poll" in request for request in server.requests) == 2
        answered.set()
        await asyncio.gather(*polls)
        assert server.connections <= 4
        await few.aclose()


async def test_a_request_that_is_cancelled_leaves_nothing(
    saying: Saying, http: AiohttpTransport
) -> None:
    silent = await saying()
    task = asyncio.create_task(ask(http, silent.url))
    await silent.asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert http.session is not None and http.session.connector is not None
    assert not http.session.connector._acquired
