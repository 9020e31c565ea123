"""The aiohttp server of the router and of the embedded engine: connections, heads and bodies are
bounded, and malformed HTTP is answered without a line in the log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, cast

from aiohttp import web

from any_agent.errors import AnyAgentError, InvalidRequest, PayloadTooLarge
from any_agent.runtime.open_files import HEALTH, ConnectionLimit
from any_agent.runtime.request_limits import BodyTimeout

log = logging.getLogger(__name__)

KEEPALIVE = 75.0
"""Seconds after which a connection without a request or with unfinished headers is closed."""

PART_TIMEOUT = 60.0  # seconds until the next part of a body


class BoundedConnection(web.RequestHandler):
    """The connection of one client."""

    limit: ConnectionLimit
    head_limits = "128 headers of 8 KB each"
    """aiohttp's own limits, in words."""
    crowded = False
    """The connection is above the bound: it is for health alone, and for one request."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        room = self.limit.enter(self)
        if room != "any":
            self.crowded, self._lingering_time = True, 0.0
        if room == "none":
            writing = cast(asyncio.WriteTransport, transport)
            writing.write(self.limit.answer())
            writing.close()

    def connection_lost(self, exc: BaseException | None) -> None:
        self.limit.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.limit.hear(self, used=self._request_count > 0)

    def close_if_idle(self, answer: bytes) -> bool:
        """Write ``answer`` and close, if it waits for a request; return whether it did."""
        # A connection that was accepted in this turn of the loop does not wait yet.
        unused = self._request_count == 0
        idle = unused or (self._waiter is not None and not self._waiter.done())
        if idle and self.transport is not None:
            cast(asyncio.WriteTransport, self.transport).write(answer)
            self.force_close()
        return idle

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer malformed HTTP (400) or a bug (500). The bytes are not logged: they hold keys."""
        if status < 500:
            error: AnyAgentError = InvalidRequest(
                f"the request is not valid HTTP, or it exceeds {self.head_limits}"
            )
        elif isinstance(exc, ConnectionError):
            # The client left while its answer was being sent. OpenAI's SDK does so at the end of
            # every stream, as it does not wait for the last, empty chunk.
            raise exc
        else:
            log.error("a request failed because of a bug", exc_info=exc)
            error = AnyAgentError("the server failed; its log has the reason")
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has started, so no error can be sent")
        response = self.encode(error, request, status)
        response.force_close()
        return response

    def encode(self, error: AnyAgentError, request: web.BaseRequest, status: int) -> web.Response:
        """Return an error as an answer."""
        return web.json_response(error.body(), status=status, headers=error.headers())


class BoundedServer(web.Server):
    """A server that closes idle and slow connections, and cancels the handler of a request whose
    client leaves."""

    connection_type: type[BoundedConnection] = BoundedConnection

    def __init__(
        self, handler: Callable[[Any], Awaitable[web.StreamResponse]], **options: Any
    ) -> None:
        super().__init__(
            handler,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=KEEPALIVE,
            **options,
        )
        self.limit = ConnectionLimit()

    def __call__(self) -> web.RequestHandler:
        connection = self.connection_type(self, loop=self._loop, **self._kwargs)
        connection.limit = self.limit
        return connection


class BoundedRunner(web.AppRunner):
    """Runs an application on a `BoundedServer`."""

    async def _make_server(self) -> web.Server:
        plain = await super()._make_server()
        return BoundedServer(plain.request_handler, request_factory=plain.request_factory)


def is_crowded(request: web.BaseRequest) -> bool:
    """Return whether a request came on a connection above the bound, which ends with it."""
    return isinstance(request.protocol, BoundedConnection) and request.protocol.crowded


def require_room(request: web.BaseRequest) -> None:
    """Raise ServiceUnavailable on a connection above the bound, except for health."""
    if is_crowded(request) and request.path not in HEALTH:
        raise cast(BoundedConnection, request.protocol).limit.error()


async def read_body(request: web.BaseRequest, max_bytes: int, seconds: float) -> bytes:
    """Return a body; PayloadTooLarge above ``max_bytes``, InvalidRequest if it takes longer."""
    time = BodyTimeout(part=PART_TIMEOUT, whole=seconds, whole_name="this server's time limit")
    parts: list[bytes] = []
    size = 0
    while part := await time.within(request.content.readany()):
        size += len(part)
        if size > max_bytes:
            raise PayloadTooLarge(f"the body exceeds {max_bytes} bytes; send a shorter one")
        parts.append(part)
    return b"".join(parts)
