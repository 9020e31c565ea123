"""A client's connection: what is no HTTP is told so in our shape, and no head is endless.

uvicorn bounds neither the bytes of a request's head nor the time that it takes to come.
"""

from __future__ import annotations

import asyncio

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from any_agent.errors import InvalidRequest

_HEAD_BYTES = 131_072
"""Far above what is served: what is served, the app says itself."""
_HEAD_SECONDS = 75.0


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's, with bounds."""

    _timer: asyncio.TimerHandle | None = None
    _in_head = True
    _head_bytes = 0
    """Of a head that is not complete."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._have_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head and self._timer is None:
            # The next request of a connection that was idle.
            self._expect_head()
        self._head_bytes += len(data) if self._in_head else 0
        super().data_received(data)
        if self._head_bytes > _HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("")

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._have_head()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        error = InvalidRequest("the request is not valid HTTP, or its head is too long")
        body = orjson.dumps(error.body())
        lines = [
            b"HTTP/1.1 400 Bad Request",
            b"content-type: application/json",
            b"content-length: %d" % len(body),
            b"connection: close",
        ]
        self.transport.write(b"\r\n".join([*lines, b"", body]))
        self.transport.close()

    def _expect_head(self) -> None:
        self._timer = self.loop.call_later(_HEAD_SECONDS, self.transport.close)

    def _have_head(self) -> None:
        self._head_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
