"""Requests to ranks over one shared client session, and what became of those that failed."""

from __future__ import annotations

import select
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
from aiohttp import hdrs
from aiohttp.client_reqrep import ClientRequest, ClientResponse
from aiohttp.connector import Connection
from aiohttp.typedefs import LooseHeaders
from multidict import CIMultiDict, CIMultiDictProxy, istr
from yarl import URL

from any_agent.errors import ReplyLost

_CONNECT_TIMEOUT = 5.0
_STALE_TRIES = 10
_KEEPALIVE = 60.0
"""Seconds; below the 75 after which a proxy closes an idle connection."""
_HOP_BY_HOP = tuple(
    # Their lower-case forms are computed once.
    istr(name)
    for name in (
        "Connection",
        "Keep-Alive",
        "Proxy-Authenticate",
        "Proxy-Authorization",
        "Proxy-Connection",
        "TE",
        "Trailer",
        "Transfer-Encoding",
        "Upgrade",
    )
)
_NOT_ADDED: CIMultiDict[None] = CIMultiDict(
    (name, None) for name in ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
)
"""Headers that aiohttp would set where a client sent none."""
Body = bytes | AsyncIterator[bytes] | None


class NeverSent(Exception):
    """No byte of the request has reached the rank."""


class _Stale(aiohttp.ClientConnectionError):
    """A pooled connection was closed by its rank while nobody looked."""


class _UpstreamRequest(ClientRequest):
    """Sends the headers as they are, and looks at a connection before it writes to it."""

    def update_headers(self, headers: LooseHeaders | None) -> None:
        """Takes the session's copy of them; one by one they would be copied again."""
        assert isinstance(headers, CIMultiDict)
        self.headers = headers
        if hdrs.HOST not in headers:
            headers[hdrs.HOST] = self.url.host_port_subcomponent or ""

    def update_auto_headers(self, skip_auto_headers: Iterable[str] | None) -> None:
        """Adds none, which the session asks for, too; finding that out anew takes copies."""
        self._skip_auto_headers = _NOT_ADDED

    async def send(self, conn: Connection) -> ClientResponse:
        # What a rank that has died meanwhile closed is found out now, when it costs nothing; found
        # out after the request was written, nobody could tell whether the rank had acted on it.
        transport = conn.transport
        if transport is None or _has_news(transport.get_extra_info("socket").fileno()):
            raise _Stale
        return await super().send(conn)


def _has_news(fd: int) -> bool:
    """Whether there is something to read, be it the end: there must be nothing yet."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


@dataclass(frozen=True, slots=True)
class UpstreamResponse:
    """A rank's answer, read whole."""

    rank: int
    status: int
    headers: CIMultiDict[str]
    body: bytes


class Upstream:
    """The ranks' HTTP side. Made by `open_upstream`."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def send(
        self, method: str, origin: str, target: str, headers: CIMultiDict[str], body: Body
    ) -> aiohttp.ClientResponse:
        """Send a request and return when its answer begins.

        NeverSent: it may be sent again. ReplyLost: the rank may have acted on it.
        """
        url = URL(origin + target, encoded=True)
        for _ in range(_STALE_TRIES):
            try:
                return await self._session.request(
                    method, url, headers=headers, data=body, allow_redirects=False
                )
            except _Stale:
                # Each try uses up one pooled connection.
                continue
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                raise NeverSent from error
            except (aiohttp.ClientError, OSError) as error:
                raise reply_lost() from error
        # New ones are closed at once, too.
        raise NeverSent

    async def exchange(
        self,
        rank: int,
        method: str,
        origin: str,
        target: str,
        headers: CIMultiDict[str],
        body: bytes | None,
    ) -> UpstreamResponse:
        """As `send`, with the whole answer."""
        response = await self.send(method, origin, target, headers, body)
        async with response:
            content = await read_whole(response)
        return UpstreamResponse(rank, response.status, end_to_end(response.headers), content)


def reply_lost() -> ReplyLost:
    return ReplyLost("the rank died before it answered; whether it did what was asked is not known")


async def read_whole(response: aiohttp.ClientResponse) -> bytes:
    """The body; ReplyLost when it breaks off."""
    try:
        return await response.read()
    except (aiohttp.ClientError, OSError) as error:
        raise reply_lost() from error


def end_to_end(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """A copy without what concerns one connection only."""
    out = CIMultiDict(headers)
    for value in headers.getall(hdrs.CONNECTION, ()):
        for name in value.split(","):
            # Content-Length frames the body, whatever somebody calls it.
            if name.strip().lower() != "content-length":
                out.popall(name.strip(), None)
    for name in _HOP_BY_HOP:
        out.popall(name, None)
    return out


@asynccontextmanager
async def open_upstream() -> AsyncIterator[Upstream]:
    """One session for the whole life of the router: a session per request costs twice as much.

    No limit on connections, since the ranks bound their calls and a full pool would be a hidden
    queue; no total time-out, since a long answer is no error; nothing added to what passes through.
    """
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT),
        auto_decompress=False,
        trust_env=False,
        # One client's cookies are not another's.
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=_NOT_ADDED.keys(),
        request_class=_UpstreamRequest,
        max_line_size=65_536,
        max_field_size=65_536,
    )
    # It would repeat GET and PUT by itself, and a GET may open a session.
    session._retry_connection = False
    try:
        yield Upstream(session)
    finally:
        await session.close()
