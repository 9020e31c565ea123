"""HTTP/1.1 connections to the ranks: one pool for the router's life, parsed by httptools."""

from __future__ import annotations

import asyncio
import errno
import select
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self, cast
from urllib.parse import urlsplit

import httptools
from aiohttp import hdrs
from multidict import CIMultiDict, CIMultiDictProxy, istr

from any_agent.errors import ReplyLost, ServiceUnavailable

CONNECT_TIMEOUT = 5.0
OUT_OF_DESCRIPTORS = "too_many_connections"
"""The code of the error of a router that has no file descriptor for a connection to a rank."""
_STALE_TRIES = 10
_KEEPALIVE = 60.0
"""Seconds until an idle connection is closed, fewer than the 75 after which a proxy does it."""
_MAX_BUFFERED_BYTES = 131_072  # unread bytes of one answer above which reading from the rank pauses
_MAX_HEAD_BYTES = 65_536
_NO_BODY_METHODS = ("GET", "HEAD", "OPTIONS", "TRACE", "DELETE")
_HOP_BY_HOP = tuple(
    # An istr computes its lower-case form once.
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
Body = bytes | AsyncIterator[bytes] | None
Push = Callable[[bytes], bool]
"""Passes a part of a body on at once, or returns False to leave it."""


class NeverSent(Exception):
    """The failure of a request of which no byte has reached the rank."""


class _Stale(Exception):
    """The failure of a pooled connection that the rank closed before the request was written."""


@dataclass(frozen=True, slots=True)
class UpstreamResponse:
    """A rank's whole answer, its headers without those of one connection."""

    rank: int
    status: int
    headers: CIMultiDict[str]
    body: bytes


class RankResponse:
    """A rank's answer while it arrives. Leaving its context releases or closes the connection."""

    def __init__(self, connection: _RankConnection, transport: asyncio.Transport) -> None:
        self._connection = connection
        self.status = 0
        self.reason = ""
        self.headers: CIMultiDict[str] = CIMultiDict()
        self.head_size = 0
        self.content = asyncio.StreamReader(_MAX_BUFFERED_BYTES // 2, asyncio.get_running_loop())
        """The bytes that have not been read; reading from the rank pauses while there are many."""
        self.content.set_transport(transport)
        self.begun = False
        """Bytes of the body have arrived, or its end."""
        self.complete = False
        """The last byte has arrived; some may not have been read."""
        self.error: ReplyLost | None = None
        """The connection broke off before the answer was complete."""
        self._push: Push | None = None

    @property
    def content_length(self) -> int | None:
        """The body's length in bytes, as its head states; None for a chunked answer."""
        length = self.headers.get(hdrs.CONTENT_LENGTH)
        return int(length) if length is not None and length.isdecimal() else None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._connection.finish()

    async def read(self) -> bytes:
        """Return the whole body; ReplyLost when it breaks off."""
        body = await self.content.read()
        if self.error is not None:
            raise self.error
        return body

    async def readany(self, push: Push) -> bytes:
        """Return what has arrived, waiting for the first byte that ``push`` does not take; b"" at
        the end.

        ``push`` gets each part as soon as it arrives, which costs no wake-up of a task.
        ReplyLost when the connection breaks off.
        """
        self._push = push
        try:
            part = await self.content.read(sys.maxsize)
        finally:
            self._push = None
        if not part and self.error is not None:
            raise self.error
        return part

    def add(self, part: bytes) -> None:
        """Pass a part of the body on, or keep it until it is read."""
        if self._push is not None:
            if self._push(part):
                return
            # The parts after this one must stay behind it.
            self._push = None
        self.begun = True
        self.content.feed_data(part)

    def end(self, error: ReplyLost | None = None) -> None:
        """Mark the body's end, or with an error that it broke off."""
        self.begun = True
        self.complete, self.error = error is None, error
        self.content.feed_eof()


class _RankConnection(asyncio.Protocol):
    """One connection to a rank, which carries one request at a time."""

    def __init__(self, pool: deque[_RankConnection]) -> None:
        self._pool = pool
        self.idle_since = 0.0
        self._transport: asyncio.Transport
        self._socket_fd = -1
        self._parser: Any = None
        self._method = ""
        self._response: RankResponse | None = None
        self._head: asyncio.Future[RankResponse] | None = None
        self._body: asyncio.Task[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._reusable = False
        self._closed = False

    # -- the transport's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._socket_fd = transport.get_extra_info("socket").fileno()

    def data_received(self, data: bytes) -> None:
        if self._response is None:
            # No request was sent on this connection, so the data answers none.
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._fail()
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        with suppress(ValueError):
            self._pool.remove(self)
        self.resume_writing()
        self._fail()

    def pause_writing(self) -> None:
        self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._writable is not None:
            if not self._writable.done():
                self._writable.set_result(None)
            self._writable = None

    # -- the parser's callbacks

    def on_message_begin(self) -> None:
        if self._response is not None and self._response.complete:
            raise ValueError("a second answer follows the one that was asked for")

    def on_status(self, reason: bytes) -> None:
        response = self._response
        assert response is not None
        response.reason += reason.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        response = self._response
        assert response is not None
        response.head_size += len(name) + len(value)
        if response.head_size > _MAX_HEAD_BYTES:
            raise ValueError("the head of the answer is too large")
        response.headers.add(name.decode("latin-1"), value.decode("utf-8", "surrogateescape"))

    def on_headers_complete(self) -> None:
        response = self._response
        assert response is not None
        status = self._parser.get_status_code()
        if status < 200:
            response.headers.clear()
            response.reason = ""
            return
        response.status = status
        self._reusable = self._parser.should_keep_alive()
        if self._method == "HEAD":
            # The parser expects the body that the head announces.
            self._reusable = False
            response.end()
        if self._head is not None and not self._head.done():
            self._head.set_result(response)

    def on_body(self, part: bytes) -> None:
        response = self._response
        assert response is not None
        response.add(part)

    def on_message_complete(self) -> None:
        response = self._response
        if response is not None and response.status:
            response.end()

    # -- one request

    async def send(self, method: str, head: bytes, body: Body, *, chunked: bool) -> RankResponse:
        """Send an encoded head and a body; return the answer when its head is there.

        `_Stale` if the rank has closed the connection, before a byte is written; else ReplyLost.
        """
        # Find out now whether the rank has closed the connection: after the request was written,
        # nothing could tell whether the rank had acted on it.
        if self._closed or self._transport.is_closing() or _has_news(self._socket_fd):
            self.close()
            raise _Stale
        self._method = method
        self._parser = httptools.HttpResponseParser(self)
        self._response = RankResponse(self, self._transport)
        answered: asyncio.Future[RankResponse] = asyncio.get_running_loop().create_future()
        self._head = answered
        if body is None or isinstance(body, bytes):
            self._transport.write(head + body if body else head)
        else:
            self._transport.write(head)
            self._body = asyncio.create_task(self._write_body(body, chunked=chunked))
        try:
            return await answered
        except BaseException:
            self.close()
            raise
        finally:
            self._head = None

    async def _write_body(self, body: AsyncIterator[bytes], *, chunked: bool) -> None:
        try:
            async for part in body:
                if self._closed:
                    return
                self._transport.write(b"%x\r\n%b\r\n" % (len(part), part) if chunked else part)
                if self._writable is not None:
                    await self._writable
            if chunked:
                self._transport.write(b"0\r\n\r\n")
        except Exception:
            # The client's body broke off: `RequestBody.error` says why.
            self.close()

    def finish(self) -> None:
        """End the exchange: back to the pool after a complete answer, closed after any other."""
        response, self._response = self._response, None
        sent = self._body is None or self._body.done()
        if self._body is not None:
            self._body.cancel()
            self._body = None
        if not (response and response.complete and sent and self._reusable) or self._closed:
            self.close()
            return
        self._transport.resume_reading()
        now = self.idle_since = time.monotonic()
        pool = self._pool
        while pool and now - pool[0].idle_since > _KEEPALIVE:
            pool.popleft().close()
        pool.append(self)

    def close(self) -> None:
        """Abort the connection."""
        if self._body is not None:
            self._body.cancel()
            self._body = None
        if not self._closed:
            self._transport.abort()

    def _fail(self) -> None:
        response = self._response
        if response is None or response.complete:
            return
        lost = reply_lost()
        response.end(lost)
        if self._head is not None and not self._head.done():
            self._head.set_exception(lost)


def _encode_head(
    method: str, target: str, headers: CIMultiDict[str], body: Body, *, chunked: bool
) -> bytes:
    lines = [f"{method} {target} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if chunked:
        lines.append("Transfer-Encoding: chunked")
    elif hdrs.CONTENT_LENGTH not in headers and (body or method not in _NO_BODY_METHODS):
        lines.append(f"Content-Length: {len(body) if isinstance(body, bytes) else 0}")
    head = "\r\n".join(lines) + "\r\n\r\n"
    if head.count("\n") != len(lines) + 1 or head.count("\r") != len(lines) + 1:
        raise ValueError("a header of the request holds a line break")
    # Bytes that are not text are left out, as in the headers of answers.
    return head.encode("utf-8", "ignore")


def _has_news(fd: int) -> bool:
    """Return whether data or the end of the connection has arrived; an idle one has neither."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


class Upstream:
    """The pool of connections to the ranks, opened by `open_upstream`."""

    def __init__(self) -> None:
        self._idle: dict[str, deque[_RankConnection]] = {}

    async def send(
        self, method: str, origin: str, target: str, headers: CIMultiDict[str], body: Body
    ) -> RankResponse:
        """Send a request and return when its answer begins.

        NeverSent if the request may be sent again, ReplyLost if the rank may have acted on it.
        """
        pool = self._idle.get(origin)
        if pool is None:
            pool = self._idle[origin] = deque()
        if hdrs.HOST not in headers:
            headers[hdrs.HOST] = urlsplit(origin).netloc
        streamed = body is not None and not isinstance(body, bytes)
        chunked = streamed and hdrs.CONTENT_LENGTH not in headers
        head = _encode_head(method, target, headers, body, chunked=chunked)
        for _ in range(_STALE_TRIES):
            connection = pool.pop() if pool else await self._connect(origin, pool)
            if connection.idle_since and time.monotonic() - connection.idle_since > _KEEPALIVE:
                connection.close()
                connection = await self._connect(origin, pool)
            try:
                return await connection.send(method, head, body, chunked=chunked)
            except _Stale:
                continue
        # The rank closes new connections at once, too.
        raise NeverSent

    @staticmethod
    async def _connect(origin: str, pool: deque[_RankConnection]) -> _RankConnection:
        url = urlsplit(origin)
        secure = url.scheme == "https"
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                _, connection = await loop.create_connection(
                    lambda: _RankConnection(pool),
                    url.hostname or "",
                    url.port or (443 if secure else 80),
                    ssl=True if secure else None,
                )
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                # The rank is well: this process has no descriptor left to reach it by.
                raise ServiceUnavailable(
                    "the router has no file descriptor left for a connection to a rank; try again",
                    code=OUT_OF_DESCRIPTORS,
                    retry_after=2,
                ) from None
            raise NeverSent from error
        return connection

    def close(self) -> None:
        """Close the idle connections."""
        for pool in self._idle.values():
            while pool:
                pool.pop().close()


def reply_lost() -> ReplyLost:
    """Return the error for an answer that broke off."""
    return ReplyLost(
        "the rank died before it answered; it is not known whether the request took effect"
    )


def end_to_end(headers: CIMultiDict[str] | CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """Return a copy of the headers without those that concern one connection only."""
    out = CIMultiDict(headers)
    for value in headers.getall(hdrs.CONNECTION, ()):
        for name in value.split(","):
            # Content-Length frames the body, whatever this header lists.
            if name.strip().lower() != "content-length":
                out.popall(name.strip(), None)
    for name in _HOP_BY_HOP:
        out.popall(name, None)
    return out


@asynccontextmanager
async def open_upstream() -> AsyncIterator[Upstream]:
    """Open the pool for the whole life of the router.

    It has no limit on connections, since the ranks bound their calls and a full pool would be a
    hidden queue; no total time-out, since a long answer is not an error; and it adds nothing to
    what passes through. It repeats no request, since a GET may open a session.
    """
    upstream = Upstream()
    try:
        yield upstream
    finally:
        upstream.close()
