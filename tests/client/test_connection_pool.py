"""Connections for many requests at once, against a server that counts them."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator

import aiohttp
import httpx
import pytest
from aiohttp import web
from yarl import URL

from any_agent.client.aiohttp_transport import AiohttpTransport, tls_context
from any_agent.errors import ConfigError
from tests.support.errors import fails_with


class Counting:
    """A server that answers when as many requests as it waits for are there."""

    def __init__(self) -> None:
        self.url = ""
        self.together = 1
        self.running = 0
        self.peers: list[object] = []
        self._all = asyncio.Event()

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        assert request.transport is not None
        self.peers.append(request.transport.get_extra_info("peername"))
        self.running += 1
        if self.running >= self.together:
            self._all.set()
        await self._all.wait()
        if request.path != "/long":
            return web.Response(text=request.path)
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(1000):
            await response.write(b"x" * 10_000)
        return response


@pytest.fixture
async def server() -> AsyncIterator[Counting]:
    server = Counting()
    runner = web.ServerRunner(web.Server(server.answer))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield server
    await runner.cleanup()


async def test_requests_wait_for_nobody(server: Counting) -> None:
    server.together = 150
    async with httpx.AsyncClient(transport=AiohttpTransport()) as http:
        urls = [f"{server.url}/{k}" for k in range(server.together)]
        answers = await asyncio.gather(*map(http.get, urls))
        assert [answer.text for answer in answers] == [f"/{k}" for k in range(server.together)]
        assert len(set(server.peers)) == server.together
        # A body that is left holds nothing.
        async with http.stream("GET", f"{server.url}/long") as response:
            async for _ in response.aiter_raw():
                break
        assert (await http.get(f"{server.url}/a")).text == "/a"


async def test_proxies_of_the_environment_are_used_if_they_are_trusted(
    server: Counting, monkeypatch: pytest.MonkeyPatch
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


async def test_a_compressed_body_is_decoded_by_the_client() -> None:
    packed = gzip.compress(b"x" * 1000)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = b"HTTP/1.1 200 OK\r\nX-Twice: 1\r\nX-Twice: 2\r\nContent-Encoding: gzip\r\n"
        writer.write(head + b"Content-Length: %d\r\n\r\n" % len(packed) + packed)

    async with (
        await asyncio.start_server(answer, "127.0.0.1", 0) as server,
        httpx.AsyncClient(transport=AiohttpTransport()) as http,
    ):
        response = await http.get(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/")
    assert response.text == "x" * 1000
    assert response.headers.get_list("x-twice") == ["1", "2"]
