"""HTTP/1.1 for many small requests to one service: what the SDK needs of it, and little more.

httpx looks at all of its connections for each request, and takes several times the CPU where it has
one only; a thousand agents of one process are a thousand sessions to open, reward and end. Its
exceptions are raised here, too, so that callers need not know which of them sent a request.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

import httpx

MAX_CONNECTIONS = 256
_POLLS = MAX_CONNECTIONS // 2
"""Connections that requests may have which wait at the service: the others go on beside them."""
_CONNECTS_AT_ONCE = 32
_CONNECTS_WITHIN = 10.0
_KEPT_IDLE = 30.0
"""Seconds that a connection waits for its next request; a service keeps it for longer."""
_LONGEST_HEAD = 65_536
_LONGEST_BODY = 64 << 20
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Answer:
    """What was answered; names as httpx has them. Names of headers are in small letters."""

    status_code: int
    headers: Mapping[str, str]
    content: bytes


class LeanHttp:
    """Connections to services, shared by any number of requests of one event loop.

    A request with a longer ``timeout`` than the usual one waits at the service: so no more than
    half of all connections are taken by such.
    """

    def __init__(self, *, timeout: float, tls: ssl.SSLContext | None = None) -> None:
        self._timeout = timeout
        self._tls = tls
        self._idle: dict[tuple[str, str, int], deque[_Connection]] = {}
        self._open: set[_Connection] = set()
        self._places = asyncio.Semaphore(MAX_CONNECTIONS)
        self._polls = asyncio.Semaphore(_POLLS)
        self._connects = asyncio.Semaphore(_CONNECTS_AT_ONCE)

    async def request(
        self,
        method: str,
        url: str,
        *,
        content: str | None = None,
        headers: Mapping[str, str],
        timeout: float,  # noqa: ASYNC109  (as httpx has it)
    ) -> Answer:
        """Raises httpx.TransportError, and httpx.UnsupportedProtocol or InvalidURL for the URL."""
        if timeout <= self._timeout:
            return await self._placed(method, url, content, headers, timeout)
        async with self._polls:
            return await self._placed(method, url, content, headers, timeout)

    async def aclose(self) -> None:
        for connection in [*self._open]:
            connection.close()
        self._open.clear()
        self._idle.clear()

    async def _placed(
        self,
        method: str,
        url: str,
        content: str | None,
        headers: Mapping[str, str],
        within: float,
    ) -> Answer:
        place, head = _written(method, url, headers)
        body = content.encode() if content is not None else b""
        if body or method in ("POST", "PUT"):
            head += f"content-length: {len(body)}\r\n"
        async with self._places:
            connection = await self._connection(place)
            try:
                async with asyncio.timeout(within):
                    answer = await connection.ask(f"{head}\r\n".encode("latin-1") + body)
            except TimeoutError as error:
                connection.close()
                raise httpx.ReadTimeout(f"no answer within {within:g} s") from error
            except BaseException:
                connection.close()
                raise
            finally:
                if connection.reusable:
                    connection.idle_since = asyncio.get_running_loop().time()
                    self._idle.setdefault(place, deque()).append(connection)
                else:
                    self._open.discard(connection)
            return answer

    async def _connection(self, place: tuple[str, str, int]) -> _Connection:
        """One that waits, the last used first, or a new one."""
        idle = self._idle.get(place)
        loop = asyncio.get_running_loop()
        while idle:
            connection = idle.pop()
            if connection.reusable and loop.time() - connection.idle_since < _KEPT_IDLE:
                return connection
            connection.close()
            self._open.discard(connection)
        scheme, host, port = place
        tls = (self._tls or httpx.create_ssl_context()) if scheme == "https" else None
        try:
            async with self._connects, asyncio.timeout(_CONNECTS_WITHIN):
                _, connection = await loop.create_connection(_Connection, host, port, ssl=tls)
        except TimeoutError as error:
            raise httpx.ConnectTimeout(f"no connection within {_CONNECTS_WITHIN:g} s") from error
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error
        self._open.add(connection)
        return connection


class _Connection(asyncio.Protocol):
    """One request at a time: its answer, read whole."""

    def __init__(self) -> None:
        self.idle_since = 0.0
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Answer] | None = None
        self._buffer = bytearray()
        self._head: _Head | None = None
        self._body = bytearray()
        self._lost = False
        self._keeps = True

    @property
    def reusable(self) -> bool:
        return not self._lost and self._keeps and self._answer is None and not self._buffer

    async def ask(self, request: bytes) -> Answer:
        if self._lost or self._transport is None:
            raise httpx.ReadError("the connection was closed")
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    def close(self) -> None:
        self._lost = True
        if self._transport is not None:
            self._transport.abort()

    # -- the event loop's --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._answer is None:
            # Nobody has asked: a service that says good-bye. It is not used again.
            return
        try:
            self._read()
        except (ValueError, IndexError) as error:
            self._fail(httpx.RemoteProtocolError(f"what was answered is no HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        if self._head is not None and self._head.until_closed and exc is None:
            self._body += self._buffer
            self._finish()
        else:
            self._fail(httpx.ReadError("the connection broke before the answer was there"))

    # -- reading -----------------------------------------------------------------------------------

    def _read(self) -> None:
        while self._head is None:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                if len(self._buffer) > _LONGEST_HEAD:
                    raise ValueError("its head has no end")
                return
            head = _Head(bytes(self._buffer[:end]).decode("latin-1"))
            del self._buffer[: end + 4]
            # Those before 200 only announce the answer.
            self._head = head if head.status >= 200 else None
        head = self._head
        if head.chunked:
            if not self._chunks():
                return
        elif head.until_closed:
            if len(self._buffer) > _LONGEST_BODY:
                raise ValueError("its body is too long")
            return
        else:
            if head.length > _LONGEST_BODY:
                raise ValueError("its body is too long")
            if len(self._buffer) < head.length:
                return
            self._body += self._buffer[: head.length]
            del self._buffer[: head.length]
        self._finish()

    def _chunks(self) -> bool:
        """Take the chunks that are there; whether the last one was among them."""
        while True:
            end = self._buffer.find(b"\r\n")
            if end < 0:
                return False
            size = int(self._buffer[:end].split(b";")[0], 16)
            if size < 0 or len(self._body) + size > _LONGEST_BODY:
                raise ValueError("its body is too long")
            if size == 0:
                # Trailers, of which nobody here sends any, end with an empty line.
                if len(self._buffer) < end + 4:
                    return False
                if self._buffer[end + 2 : end + 4] != b"\r\n":
                    raise ValueError("it has trailers")
                del self._buffer[: end + 4]
                return True
            if len(self._buffer) < end + 2 + size + 2:
                return False
            self._body += self._buffer[end + 2 : end + 2 + size]
            del self._buffer[: end + 2 + size + 2]

    def _finish(self) -> None:
        head, answer = self._head, self._answer
        assert head is not None
        self._keeps = head.keeps
        body, self._body = bytes(self._body), bytearray()
        self._head = self._answer = None
        if answer is not None and not answer.done():
            answer.set_result(Answer(head.status, head.fields, body))

    def _fail(self, error: Exception) -> None:
        self._lost = True
        answer, self._answer = self._answer, None
        if self._transport is not None:
            self._transport.abort()
        if answer is not None and not answer.done():
            answer.set_exception(error)


class _Head:
    """An answer's first lines, and how its body ends. ValueError."""

    __slots__ = ("chunked", "fields", "keeps", "length", "status", "until_closed")

    def __init__(self, text: str) -> None:
        first, *lines = text.split("\r\n")
        version, _, rest = first.partition(" ")
        if version not in ("HTTP/1.1", "HTTP/1.0"):
            raise ValueError(repr(first[:40]))
        self.status = int(rest[:3])
        self.fields: dict[str, str] = {}
        for line in lines:
            name, colon, value = line.partition(":")
            if not colon:
                raise ValueError(repr(line[:40]))
            name, value = name.strip().lower(), value.strip()
            self.fields[name] = f"{self.fields[name]}, {value}" if name in self.fields else value
        self.chunked = "chunked" in self.fields.get("transfer-encoding", "").lower()
        said = self.fields.get("content-length")
        none = self.status in (204, 304)
        self.until_closed = not (self.chunked or said is not None or none)
        self.length = int(said) if said is not None and not none else 0
        if self.length < 0:
            raise ValueError("a negative length")
        connection = self.fields.get("connection", "").lower()
        self.keeps = version == "HTTP/1.1" and "close" not in connection and not self.until_closed


def _written(method: str, url: str, headers: Mapping[str, str]) -> tuple[tuple[str, str, int], str]:
    """Where a request goes, and its head."""
    parsed: SplitResult = urlsplit(url)
    if parsed.scheme not in _PORTS:
        raise httpx.UnsupportedProtocol(f"{parsed.scheme or url[:80]!r} is neither http nor https")
    try:
        host, port = parsed.hostname, parsed.port or _PORTS[parsed.scheme]
    except ValueError as error:
        raise httpx.InvalidURL(str(error)) from None
    if not host:
        raise httpx.InvalidURL(f"{url[:80]!r} names no host")
    target = parsed.path or "/"
    if parsed.query:
        target += f"?{parsed.query}"
    named = f"[{host}]" if ":" in host else host
    if port != _PORTS[parsed.scheme]:
        named += f":{port}"
    lines = [f"{method} {target} HTTP/1.1", f"host: {named}", "accept: application/json"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    text = "\r\n".join(lines)
    if text.count("\r\n") != len(lines) - 1 or text.count("\n") != len(lines) - 1:
        raise httpx.LocalProtocolError("a line break in a header or a URL")
    return (parsed.scheme, host, port), f"{text}\r\n"
