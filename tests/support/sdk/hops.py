"""Two plain servers that write down what comes and redirect where they are told to, and every HTTP
client that sessions know, each asking for one URL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import aiohttp
import httpx
import httpx2
import requests
from aiohttp import web

from any_agent.sdk import session_context
from any_agent.sdk.http_patches import patches

KEY = "sk-v1.0.aaaaaaaaaaaaaaaaaaaaaaaa.bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"


@dataclass
class Server:
    """``seen`` are the heads of its requests, oldest first."""

    url: str
    seen: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    redirects: dict[str, str] = field(default_factory=dict)
    """From a path to a whole URL."""

    @property
    def keys(self) -> list[str | None]:
        """The bearer of each request."""
        return [headers.get("authorization") for _, headers in self.seen]


@asynccontextmanager
async def serving(host: str = "127.0.0.1") -> AsyncIterator[Server]:
    server = Server("")

    async def answer(request: web.BaseRequest) -> web.Response:
        headers = {name.lower(): value for name, value in request.headers.items()}
        server.seen.append((request.path, headers))
        if (target := server.redirects.get(request.path)) is not None:
            return web.Response(status=307, headers={"Location": target})
        return web.json_response({"ok": True})

    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    site = web.TCPSite(runner, host, 0)
    await site.start()
    server.url = f"http://{host}:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()


@contextmanager
def in_session(url: str, key: str = KEY) -> Iterator[None]:
    """Have clients be patched, and what they ask for inside join the session of this key."""
    patches.acquire()
    membership = session_context.join(url, key)
    try:
        yield
    finally:
        session_context.leave(membership)
        patches.release()


Get = Callable[[str, dict[str, str]], Awaitable[None]]


async def by_aiohttp(url: str, headers: dict[str, str]) -> None:
    async with aiohttp.ClientSession(headers=headers) as http, http.get(url) as response:
        await response.read()


async def by_aiohttp_with_auth(url: str, headers: dict[str, str]) -> None:
    auth = aiohttp.BasicAuth("me", "mine")
    async with aiohttp.ClientSession(auth=auth) as http, http.get(url) as response:
        await response.read()


async def by_httpx(url: str, headers: dict[str, str]) -> None:
    async with httpx.AsyncClient(follow_redirects=True, headers=headers) as http:
        await http.get(url)


async def by_httpx_with_auth(url: str, headers: dict[str, str]) -> None:
    async with httpx.AsyncClient(follow_redirects=True, auth=("me", "mine")) as http:
        await http.get(url)


async def by_httpx_blocking(url: str, headers: dict[str, str]) -> None:
    def get() -> None:
        with httpx.Client(follow_redirects=True, headers=headers) as http:
            http.get(url)

    await asyncio.to_thread(get)


async def by_httpx2(url: str, headers: dict[str, str]) -> None:
    async with httpx2.AsyncClient(follow_redirects=True, headers=headers) as http:
        await http.get(url)


async def by_httpx2_blocking(url: str, headers: dict[str, str]) -> None:
    def get() -> None:
        with httpx2.Client(follow_redirects=True, headers=headers) as http:
            http.get(url)

    await asyncio.to_thread(get)


async def by_requests(url: str, headers: dict[str, str]) -> None:
    def get() -> None:
        with requests.Session() as http:
            http.headers.update(headers)
            http.get(url)

    await asyncio.to_thread(get)


async def by_requests_with_auth(url: str, headers: dict[str, str]) -> None:
    await asyncio.to_thread(requests.get, url, auth=("me", "mine"))


CLIENTS: list[Get] = [
    by_aiohttp,
    by_aiohttp_with_auth,
    by_httpx,
    by_httpx_with_auth,
    by_httpx_blocking,
    by_httpx2,
    by_httpx2_blocking,
    by_requests,
    by_requests_with_auth,
]
