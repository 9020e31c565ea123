"""Connections for many requests at once.

httpx's own pool looks at every connection for every other one whenever a request begins or ends:
with a thousand under way that is 13 ms of CPU each. Here a request takes a connection, or makes
one, and gives it back.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import cast
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

_KEPT = 64
"""Connections without a request that are kept."""
_ONE = httpx.Limits(max_connections=1)


class UnpooledTransport(httpx.AsyncBaseTransport):
    """As many as there are requests under way. Requests wait for each other nowhere."""

    def __init__(self, tls: ssl.SSLContext | bool = True) -> None:
        self._tls = httpx.create_ssl_context() if tls is True else tls
        self._idle: dict[bytes, list[httpx.AsyncHTTPTransport]] = {}
        """By origin; the one that was used last is used next."""
        self._kept = 0
        self._closed = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        origin = b"%b:%b" % (request.url.raw_scheme, request.url.netloc)
        connection = self._taken(origin)
        try:
            response = await connection.handle_async_request(request)
        except BaseException:
            await connection.aclose()
            raise
        stream = cast(httpx.AsyncByteStream, response.stream)
        response.stream = _Stream(stream, lambda: self._give_back(origin, connection))
        return response

    async def aclose(self) -> None:
        self._closed = True
        idle, self._idle, self._kept = self._idle, {}, 0
        for connections in idle.values():
            for connection in connections:
                await connection.aclose()

    def _taken(self, origin: bytes) -> httpx.AsyncHTTPTransport:
        if idle := self._idle.get(origin):
            self._kept -= 1
            return idle.pop()
        return httpx.AsyncHTTPTransport(verify=self._tls, limits=_ONE, trust_env=False)

    async def _give_back(self, origin: bytes, connection: httpx.AsyncHTTPTransport) -> None:
        if self._closed or self._kept >= _KEPT:
            await connection.aclose()
            return
        self._kept += 1
        self._idle.setdefault(origin, []).append(connection)


class _Stream(httpx.AsyncByteStream):
    """A response's body, which gives its connection back when it is closed."""

    def __init__(
        self, stream: httpx.AsyncByteStream, give_back: Callable[[], Awaitable[None]]
    ) -> None:
        self._stream = stream
        self._give_back: Callable[[], Awaitable[None]] | None = give_back

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            yield part

    async def aclose(self) -> None:
        give_back, self._give_back = self._give_back, None
        try:
            await self._stream.aclose()
        finally:
            if give_back is not None:
                await give_back()


def connections_to(
    url: str | None, *, trust_env: bool, tls: ssl.SSLContext | None
) -> UnpooledTransport | None:
    """A client's transport; None where the environment names proxies on the way there."""
    if trust_env and proxied(url):
        return None
    return UnpooledTransport(True if tls is None else tls)


def proxied(url: str | None) -> bool:
    """Whether the environment names proxies on the way there; None: wherever that is."""
    host = urlsplit(url).netloc if url is not None else ""
    named = getproxies().keys() & {"http", "https", "all"}
    return bool(named) and not (host and proxy_bypass(host))
