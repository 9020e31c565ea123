"""The HTTP transport of all clients: aiohttp's connections, also under httpx's clients.

httpx's pool searches all of its connections for each request, and takes several times aiohttp's CPU
even with a single one, while a thousand agents of one process open, reward and end a thousand
sessions. Errors are httpx's exceptions on both ways of sending a request.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING
from urllib.request import getproxies, proxy_bypass

import httpx

from any_agent.errors import ConfigError

if TYPE_CHECKING:
    import aiohttp
    from yarl import URL

MAX_CONNECTIONS = 256
MAX_POLLS = MAX_CONNECTIONS // 2
"""Connections for requests that wait at the service; the others stay free for short requests."""
_CONNECT_TIMEOUT = 10.0
_KEEPALIVE_TIMEOUT = 30.0
"""Seconds for which an idle connection is kept; a service keeps it for longer."""
_MAX_BODY = 64 << 20


@cache
def tls_context() -> ssl.SSLContext:
    """Return the process's TLS context: reading every authority's certificate takes 30 ms."""
    return httpx.create_ssl_context()


@dataclass(frozen=True, slots=True)
class Response:
    """A response with httpx's attribute names. Names of headers are case-insensitive."""

    status_code: int
    headers: Mapping[str, str]
    content: bytes


@dataclass(eq=False, kw_only=True, repr=False)
class AiohttpTransport(httpx.AsyncBaseTransport):
    """Connections to services, shared by any number of requests of one event loop.

    ``bounded``: at most 256 connections, and responses of at most 64 MiB within the whole timeout.
    A request with a longer timeout than ``timeout`` waits at the service: such requests take at
    most half of the connections. Without ``bounded`` a request waits for no other, and its timeout
    counts from the last byte. ``trust_env``: use the proxies that the environment names. ``tls``
    replaces the process's context. ``session`` is a session that the caller closes.
    """

    timeout: float = 60.0
    bounded: bool = False
    trust_env: bool = False
    tls: ssl.SSLContext | None = None
    session: aiohttp.ClientSession | None = None

    def __post_init__(self) -> None:
        self._owns_session = self.session is None
        self._proxies: dict[URL, str | None] = {}
        """The proxy for each origin that a request went to."""
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)
        self._polls = asyncio.Semaphore(MAX_POLLS)

    async def request(
        self,
        method: str,
        url: str,
        *,
        content: str | bytes | None = None,
        headers: Mapping[str, str],
        timeout: float,  # noqa: ASYNC109  (as httpx has it)
    ) -> Response:
        """Send a request and read its response.

        Raises httpx.TransportError, and httpx.UnsupportedProtocol or InvalidURL for the URL.
        """
        import aiohttp

        target = _parse_url(url)
        limit = aiohttp.ClientTimeout(
            total=timeout if self.bounded else None,
            sock_read=None if self.bounded else timeout,
            sock_connect=_CONNECT_TIMEOUT,
        )
        async with AsyncExitStack() as stack:
            if self.bounded:
                if timeout > self.timeout:
                    await stack.enter_async_context(self._polls)
                await stack.enter_async_context(self._slots)
            stack.enter_context(_httpx_errors(timeout))
            sending = self._open_session().request(
                method,
                target,
                data=content,
                headers=headers,
                timeout=limit,
                allow_redirects=False,
                skip_auto_headers=("Accept-Encoding",),
                proxy=self._proxy(target),
                ssl=self.context(target),
            )
            # aiohttp's own limits begin when the whole request is sent.
            async with asyncio.timeout(None if self.bounded else _CONNECT_TIMEOUT + timeout):
                response = await stack.enter_async_context(sending)
            body = await (self._read_bounded(response) if self.bounded else response.read())
            return Response(response.status, response.headers, body)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request of an httpx client; its response's body is streamed."""
        import aiohttp

        timeouts = request.extensions.get("timeout", {})
        limit = aiohttp.ClientTimeout(
            total=None, sock_connect=timeouts.get("connect"), sock_read=timeouts.get("read")
        )
        target = _parse_url(str(request.url))
        content = await request.aread()
        items = request.headers.multi_items()
        phases = [timeouts.get(phase) for phase in ("connect", "write", "read")]
        sent_within = None if None in phases else sum(phases)
        with _httpx_errors(timeouts.get("read")):
            async with asyncio.timeout(sent_within):
                response = await self._open_session().request(
                    request.method,
                    target,
                    data=content or None,
                    headers=[(k, v) for k, v in items if k.lower() != "transfer-encoding"],
                    timeout=limit,
                    allow_redirects=False,
                    skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
                    auto_decompress=False,
                    proxy=self._proxy(target),
                    ssl=self.context(target),
                )
        return httpx.Response(
            response.status,
            headers=list(response.raw_headers),
            stream=_ResponseStream(response, timeouts.get("read")),
        )

    async def aclose(self) -> None:
        session, self.session = self.session, None
        if session is not None and self._owns_session:
            await session.close()

    def _open_session(self) -> aiohttp.ClientSession:
        if self.session is None:
            import aiohttp

            connector = aiohttp.TCPConnector(
                limit=MAX_CONNECTIONS if self.bounded else 0,
                keepalive_timeout=_KEEPALIVE_TIMEOUT,
            )
            jar = aiohttp.DummyCookieJar()
            self.session = aiohttp.ClientSession(connector=connector, cookie_jar=jar)
        return self.session

    def context(self, url: URL) -> ssl.SSLContext | bool:
        if url.scheme != "https" or (self.tls is None and not self._owns_session):
            # The connector of the caller's session may have a context of its own.
            return True
        return self.tls or tls_context()

    def _proxy(self, url: URL) -> str | None:
        if not self.trust_env:
            return None
        origin = url.origin()
        if origin not in self._proxies:
            named = getproxies()
            proxy = named.get(url.scheme) or named.get("all")
            bypassed = not proxy or proxy_bypass(url.authority)
            self._proxies[origin] = None if bypassed else _proxy_url(str(proxy))
        return self._proxies[origin]

    async def _read_bounded(self, response: aiohttp.ClientResponse) -> bytes:
        body = bytearray()
        if (response.content_length or 0) <= _MAX_BODY:
            async for part in response.content.iter_any():
                body += part
                if len(body) > _MAX_BODY:
                    break
            else:
                return bytes(body)
        response.close()
        raise httpx.RemoteProtocolError(f"the response is longer than {_MAX_BODY} bytes")


class _ResponseStream(httpx.AsyncByteStream):
    """The body of a response, which releases its connection when it is closed."""

    def __init__(self, response: aiohttp.ClientResponse, read_timeout: float | None) -> None:
        self._response = response
        self._read_timeout = read_timeout

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _httpx_errors(self._read_timeout):
            async for part in self._response.content.iter_any():
                yield part

    async def aclose(self) -> None:
        self._response.release()


def _parse_url(url: str) -> URL:
    from yarl import URL

    try:
        target = URL(url, encoded=True)
        _ = target.port
    except ValueError as error:
        raise httpx.InvalidURL(str(error)) from None
    if target.scheme not in ("http", "https") or not target.host:
        raise httpx.UnsupportedProtocol("the URL has neither http:// nor https://, or no host")
    return target


def _proxy_url(named: str) -> str:
    """Return the URL of a proxy as an environment variable names it, `host:port` included."""
    url = named if "://" in named else f"http://{named}"
    scheme = url.partition("://")[0].lower()
    if scheme not in ("http", "https"):
        raise ConfigError(
            f"the environment names a {scheme} proxy, and this client supports HTTP proxies only: "
            "set HTTPS_PROXY or HTTP_PROXY to one, or NO_PROXY to the service's host"
        )
    return url


@contextmanager
def _httpx_errors(timeout: float | None) -> Iterator[None]:
    """Raise aiohttp's errors as httpx's; ``timeout`` is for their texts."""
    import aiohttp

    try:
        yield
    except aiohttp.InvalidUrlClientError as error:
        raise httpx.InvalidURL(str(error)) from None
    except aiohttp.NonHttpUrlClientError as error:
        raise httpx.UnsupportedProtocol(f"{error} is neither http nor https") from None
    except aiohttp.ConnectionTimeoutError as error:
        raise httpx.ConnectTimeout("the connection could not be opened in time") from error
    except TimeoutError as error:
        raise httpx.ReadTimeout(f"no response within {timeout or 0:g} s") from error
    except aiohttp.ClientConnectorError as error:
        raise httpx.ConnectError(str(error)) from error
    except aiohttp.ClientResponseError as error:
        # The head or the body is malformed; a refusal would be a response.
        raise httpx.RemoteProtocolError(f"the response is not HTTP: {error.message}") from error
    except (aiohttp.ClientError, OSError) as error:
        raise httpx.ReadError("the connection broke before the response was complete") from error
    except ValueError as error:
        raise httpx.LocalProtocolError(str(error)) from None
