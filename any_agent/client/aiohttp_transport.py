"""Many small requests at once to one service: aiohttp, for whoever knows httpx.

httpx's pool looks at all of its connections for each request, and takes several times the CPU where
it has one only; a thousand agents of one process are a thousand sessions to open, reward and end.
httpx's exceptions are raised here, too: callers need not know which of them sent a request.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx

if TYPE_CHECKING:
    import aiohttp

MAX_CONNECTIONS = 256
_POLLS = MAX_CONNECTIONS // 2
"""Connections that requests may have which wait at the service: the others go on beside them."""
_CONNECTS_TIMEOUT = 10.0
_MAX_IDLE = 30.0
"""Seconds that a connection waits for its next request; a service keeps it for longer."""
_MAX_BODY = 64 << 20


@dataclass(frozen=True, slots=True)
class Response:
    """What was answered; names as httpx has them. Names of headers are case-insensitive."""

    status_code: int
    headers: Mapping[str, str]
    content: bytes


class AiohttpTransport:
    """Connections to services, shared by any number of requests of one event loop.

    A request with a longer ``timeout`` than the usual one waits at the service: so no more than
    half of all connections are taken by such.
    """

    def __init__(self, *, timeout: float, tls: ssl.SSLContext | None = None) -> None:
        self._timeout = timeout
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None
        self._places = asyncio.Semaphore(MAX_CONNECTIONS)
        self._polls = asyncio.Semaphore(_POLLS)

    async def request(
        self,
        method: str,
        url: str,
        *,
        content: str | None = None,
        headers: Mapping[str, str],
        timeout: float,  # noqa: ASYNC109  (as httpx has it)
    ) -> Response:
        """Raises httpx.TransportError, and httpx.UnsupportedProtocol or InvalidURL for the URL."""
        if timeout <= self._timeout:
            return await self._placed(method, url, content, headers, timeout)
        async with self._polls:
            return await self._placed(method, url, content, headers, timeout)

    async def aclose(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _placed(
        self,
        method: str,
        url: str,
        content: str | None,
        headers: Mapping[str, str],
        within: float,
    ) -> Response:
        import aiohttp
        from yarl import URL

        try:
            target = URL(url, encoded=True)
            _ = target.port
        except ValueError as error:
            raise httpx.InvalidURL(str(error)) from None
        limit = aiohttp.ClientTimeout(total=within, sock_connect=_CONNECTS_TIMEOUT)
        async with self._places:
            with _as_httpx(within):
                sending = self._opened().request(
                    method,
                    target,
                    data=content,
                    headers=headers,
                    timeout=limit,
                    allow_redirects=False,
                )
                async with sending as response:
                    return Response(response.status, response.headers, await _body(response))

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            import aiohttp

            connector = aiohttp.TCPConnector(
                limit=MAX_CONNECTIONS, keepalive_timeout=_MAX_IDLE, ssl=self._tls or True
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("Accept-Encoding",),
            )
        return self._session


async def _body(response: aiohttp.ClientResponse) -> bytes:
    """All of it; httpx.RemoteProtocolError if it has no end."""
    body = bytearray()
    if (response.content_length or 0) > _MAX_BODY:
        raise _too_long(response)
    async for part in response.content.iter_any():
        body += part
        if len(body) > _MAX_BODY:
            raise _too_long(response)
    return bytes(body)


def _too_long(response: aiohttp.ClientResponse) -> httpx.TransportError:
    response.close()
    return httpx.RemoteProtocolError("the answer's body is too long")


@contextmanager
def _as_httpx(within: float) -> Iterator[None]:
    import aiohttp

    try:
        yield
    except aiohttp.InvalidUrlClientError as error:
        raise httpx.InvalidURL(str(error)) from None
    except aiohttp.NonHttpUrlClientError as error:
        raise httpx.UnsupportedProtocol(f"{error} is neither http nor https") from None
    except aiohttp.ConnectionTimeoutError as error:
        raise httpx.ConnectTimeout(f"no connection within {_CONNECTS_TIMEOUT:g} s") from error
    except TimeoutError as error:
        raise httpx.ReadTimeout(f"no answer within {within:g} s") from error
    except aiohttp.ClientConnectorError as error:
        raise httpx.ConnectError(str(error)) from error
    except aiohttp.ClientResponseError as error:
        # Only its head's or its body's form: what is refused is an answer.
        raise httpx.RemoteProtocolError(f"what was answered is no HTTP: {error.message}") from error
    except (aiohttp.ClientError, OSError) as error:
        raise httpx.ReadError("the connection broke before the answer was there") from error
    except ValueError as error:
        raise httpx.LocalProtocolError(str(error)) from None
