"""The HTTP protocol of client connections: malformed HTTP gets a JSON 400; heads are bounded, the
time of a body is, and the number of connections.

uvicorn bounds neither the bytes of a request's head nor the time that it takes to arrive, and reads
the body of a refused request for as long as it comes.
"""

from __future__ import annotations

import asyncio

import orjson
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from any_agent.errors import InvalidRequest
from any_agent.runtime.open_files import HEALTH, ConnectionLimit
from proxy_ext.web.exchange import error_response

_MAX_HEAD_BYTES = 131_072  # far above the app's own limit, which answers with a better error
HEAD_SECONDS = 75.0
ANSWER_SECONDS = 5.0  # seconds in which the app answers a body that was too slow, before we close


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with bounds on requests and connections; `bounded` makes it for a rank."""

    limit = ConnectionLimit()
    body_seconds = 120.0

    timer: asyncio.TimerHandle | None = None
    _in_head = True
    _head_bytes = 0
    """Bytes of an incomplete head."""
    _crowded = False
    """The connection is above the bound: it is for health alone, and for one request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        room = self.limit.enter(self)
        if room == "none":
            transport.write(self.limit.answer())
            transport.close()
            return
        if room == "health":
            self._crowded, self._served, self.app = True, self.app, self._only_health
        self.close_after(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self.limit.leave(self)
        self._stop_timer()
        super().connection_lost(exc)

    def close_if_idle(self, answer: bytes) -> bool:
        """Write ``answer`` and close, if it waits for a request; return whether it did."""
        idle = self._in_head and not self._answering
        if idle:
            self.transport.write(answer)
            self.transport.close()
        return idle

    def data_received(self, data: bytes) -> None:
        if self._in_head and self.timer is None and not self._answering:
            # The next request on an idle connection.
            self.close_after(HEAD_SECONDS)
        self._head_bytes += len(data) if self._in_head else 0
        super().data_received(data)
        self.limit.hear(self, used=self.cycle is not None)
        if self._head_bytes > _MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("")
        if not self._in_head and self.timer is None:
            self.close_after(self.body_seconds + ANSWER_SECONDS)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        self._stop_timer()
        super().on_headers_complete()
        if self._crowded:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        self._in_head = True
        self._stop_timer()
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

    async def _only_health(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in HEALTH:
            await self._served(scope, receive, send)
        else:
            await error_response(self.limit.error(), scope["path"])(scope, receive, send)

    @property
    def _answering(self) -> bool:
        """A request is being answered. What arrives meanwhile must not end its answer; after that
        uvicorn closes a connection on which no request begins."""
        return self.cycle is not None and not self.cycle.response_complete

    def close_after(self, seconds: float) -> None:
        self.timer = self.loop.call_later(seconds, self.transport.close)

    def _stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


def bounded(body_timeout: float) -> type[BoundedProtocol]:
    """Return the protocol of a server whose clients have so many seconds for a body."""
    fields = {"limit": ConnectionLimit(), "body_seconds": body_timeout}
    return type("RankProtocol", (BoundedProtocol,), fields)
