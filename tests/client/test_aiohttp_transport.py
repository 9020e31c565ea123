"""The SDK's HTTP client against a server that says exactly what a test wants."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import TypeAlias

import aiohttp
import httpx
import pytest
from yarl import URL

from any_agent.client import aiohttp_transport as many_requests
from any_agent.client.aiohttp_transport import AiohttpTransport, Response, tls_context
from any_agent.errors import ConfigError
from tests.support.errors import fails_with
from tests.support.proxy import until
from tests.support.router import FakeRank, Received, never

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nX-A: 1\r\n\r\nok"


Saying: TypeAlias = Callable[..., Awaitable[FakeRank]]


@pytest.fixture
async def saying() -> AsyncIterator[Saying]:
    """A server that answers every request with these parts, one after the other."""
    async with AsyncExitStack() as stack:

        async def make(*parts: bytes, close: bool = False) -> FakeRank:
            async def handler(received: Received) -> None:
                for part in parts:
                    await asyncio.sleep(0.001)
                    await received.send(part)
                if close:
                    received.writer.close()

            server = FakeRank()
            server.handler = handler if parts or close else never
            await server.start()
            stack.push_async_callback(server.kill)
            return server

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


async def test_requests_one_after_another_use_one_connection(
    saying: Saying, http: AiohttpTransport
) -> None:
    server = await saying(OK)
    for _ in range(3):
        answer = await ask(http, f"{server.url}/x?y=1", "POST", "{}")
        assert (answer.status_code, answer.content, answer.headers["x-a"]) == (200, b"ok", "1")
    assert server.connections == 1
    first = server.received[0]
    assert (first.method, first.target, first.body) == ("POST", "/x?y=1", b"{}")
    assert first.values("a") == ["b"]


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


async def test_bytes_that_are_no_answer_are_an_error_and_not_asked_for_again(
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


async def test_a_malformed_url_or_header_is_refused(saying: Saying, http: AiohttpTransport) -> None:
    for url in ("", "ftp://x", "http://", "http://h:port", "http:///x"):
        with pytest.raises((httpx.UnsupportedProtocol, httpx.InvalidURL)):
            await ask(http, url)
    server = await saying(OK)
    with pytest.raises(httpx.LocalProtocolError):
        await http.request("GET", server.url, headers={"a": "b\r\nc: d"}, timeout=1.0)
    assert not server.received


async def test_connections_are_few_however_many_ask(
    saying: Saying, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those that wait there leave some to the others."""
    monkeypatch.setattr(many_requests, "MAX_CONNECTIONS", 4)
    monkeypatch.setattr(many_requests, "MAX_POLLS", 2)
    few = AiohttpTransport(timeout=5.0, bounded=True)
    answered = asyncio.Event()
    server = await saying(OK)

    async def handler(received: Received) -> None:
        if received.target == "/poll":
            await answered.wait()
        await received.send(OK)

    server.handler = handler
    polls = [
        asyncio.create_task(few.request("GET", f"{server.url}/poll", headers={}, timeout=9.0))
        for _ in range(8)
    ]
    for _ in range(3):
        await asyncio.gather(*(ask(few, server.url) for _ in range(20)))
    assert sum(received.target == "/poll" for received in server.received) == 2
    answered.set()
    await asyncio.gather(*polls)
    assert server.connections <= 4
    await few.aclose()


async def test_a_request_that_is_cancelled_leaves_nothing(
    saying: Saying, http: AiohttpTransport
) -> None:
    silent = await saying()
    task = asyncio.create_task(ask(http, silent.url))
    await until(lambda: silent.received)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert http.session is not None and http.session.connector is not None
    assert not http.session.connector._acquired


async def echo(received: Received) -> None:
    """Say the path that was asked for."""
    text = URL(received.target).path.encode()
    await received.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(text), text))


@pytest.fixture
async def server(saying: Saying) -> FakeRank:
    server = await saying(OK)
    server.handler = echo
    return server


async def test_requests_do_not_wait_for_each_other(server: FakeRank) -> None:
    count = 150

    async def all_at_once(received: Received) -> None:
        await until(lambda: len(server.received) >= count)
        await echo(received)

    async def long(received: Received) -> None:
        await received.begin()
        for _ in range(1000):
            await received.chunk(b"x" * 10_000)

    server.handler = all_at_once
    async with httpx.AsyncClient(transport=AiohttpTransport()) as http:
        answers = await asyncio.gather(*(http.get(f"{server.url}/{k}") for k in range(count)))
        assert [answer.text for answer in answers] == [f"/{k}" for k in range(count)]
        assert server.connections == count
        # A body that is left holds nothing.
        server.handler = long
        async with http.stream("GET", server.url) as response:
            async for _ in response.aiter_raw():
                break
        server.handler = echo
        assert (await http.get(f"{server.url}/a")).text == "/a"


async def test_proxies_of_the_environment_are_used_if_they_are_trusted(
    server: FakeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    url = "http://service.invalid:8000/a"
    monkeypatch.setenv("http_proxy", server.url)
    for trust_env, found in ((True, True), (False, False)):
        transport = AiohttpTransport(trust_env=trust_env)
        try:
            response = await transport.request("GET", url, headers={}, timeout=5)
            assert found and response.content == b"/a"
        except httpx.ConnectError:
            assert not found
        await transport.aclose()
    monkeypatch.setenv("http_proxy", server.url.removeprefix("http://"))
    transport = AiohttpTransport(trust_env=True)
    assert (await transport.request("GET", url, headers={}, timeout=5)).content == b"/a"
    await transport.aclose()
    monkeypatch.setenv("http_proxy", "socks5://user:secret@127.0.0.1:1080")
    with fails_with(ConfigError, "socks5", "HTTP_PROXY") as refused:
        await AiohttpTransport(trust_env=True).request("GET", url, headers={}, timeout=5)
    assert "secret" not in str(refused.value)
    monkeypatch.setenv("no_proxy", "service.invalid")
    transport = AiohttpTransport(trust_env=True)
    with pytest.raises(httpx.ConnectError):
        await transport.request("GET", url, headers={}, timeout=5)
    await transport.aclose()


async def test_a_server_that_stops_reading_runs_into_the_time_limit() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(60)

    body, limits = b"x" * (64 << 20), httpx.Timeout(0.2)
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with httpx.AsyncClient(transport=AiohttpTransport(), timeout=limits) as http:
            with pytest.raises(httpx.ReadTimeout):
                await asyncio.wait_for(http.post(url, content=body), 20)


async def test_a_session_of_the_caller_keeps_its_own_authorities() -> None:
    async with aiohttp.ClientSession() as session:
        theirs = AiohttpTransport(session=session)
        assert theirs.context(URL("https://service")) is True
    assert AiohttpTransport().context(URL("https://service")) is tls_context()


async def test_a_compressed_body_is_decoded_by_the_client(saying: Saying) -> None:
    packed = gzip.compress(b"x" * 1000)
    head = b"HTTP/1.1 200 OK\r\nX-Twice: 1\r\nX-Twice: 2\r\nContent-Encoding: gzip\r\n"
    server = await saying(head + b"Content-Length: %d\r\n\r\n" % len(packed) + packed)
    async with httpx.AsyncClient(transport=AiohttpTransport()) as http:
        response = await http.get(server.url)
    assert response.text == "x" * 1000
    assert response.headers.get_list("x-twice") == ["1", "2"]
