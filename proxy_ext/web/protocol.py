"""The HTTP protocol of client connections: malformed HTTP gets a JSON 400, and heads are bounded.

uvicorn bounds neither the bytes of a request's head nor the time that it takes to arrive.
"""

from __future__ import annotations

import asyncio

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from any_agent.errors import InvalidRequest

_MAX_HEAD_BYTES = 131_072  # far above the app's own limit, which answers with a better error
_HEAD_SECONDS = 75.0


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with bounds on request heads."""

    _timer: asyncio.TimerHandle | None = None
    _in_head = True
    _head_bytes = 0
    """Bytes of an incomplete head."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head and self._timer is None:
            # The next request on an idle connection.
            self._expect_head()
        self._head_bytes += len(data) if self._in_head else 0
        super().data_received(data)
        if self._head_bytes > _MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("")

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._end_head()
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

    def _end_head(self) -> None:
        self._head_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
