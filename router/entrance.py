"""The entrance of a public URL: bounds on requests, errors as answers, a drain at the end."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from itertools import chain
from typing import cast

from aiohttp import hdrs, web

from any_agent.completions.apis import encode_error
from any_agent.errors import (
    AnyAgentError,
    Draining,
    InvalidRequest,
    PayloadTooLarge,
    ReplyLost,
)
from any_agent.runtime.bounded_server import BoundedConnection, BoundedServer, require_room
from any_agent.runtime.metrics import watch_loop_lag
from any_agent.runtime.request_limits import MAX_REQUESTS, RequestLimits, Reservation
from router.client_response import SERVER, ClientResponder
from router.forward import is_idempotent
from router.metrics import CLIENT_LEFT, FAILED, RouterStats

log = logging.getLogger(__name__)

_MAX_HEADER_BYTES = 32_768
_MAX_HEADERS = 128
_LIMITS = f"{_MAX_HEADERS} headers of {_MAX_HEADER_BYTES // 1024} KB together"
_MAX_LONG_BODIES = 8  # of the largest size in memory at once
_ANSWERED_WHILE_DRAINING = ("/healthz", "/metrics")
STOP_SECONDS = 1.5
"""Time for which aiohttp waits for requests under way, and again after it has cancelled them."""


class Entrance(ABC):
    """Handles every request of a server, from its start until it has drained."""

    def __init__(self, *, max_body_bytes: int, client_timeout: float) -> None:
        self.limits = limits = RequestLimits(MAX_REQUESTS)
        limits.max_bytes = max(limits.max_bytes, _MAX_LONG_BODIES * max_body_bytes)
        self.stats = RouterStats()
        self.replies = ClientResponder(timeout=client_timeout)
        self.draining = False
        """Requests under way go on, and new ones are refused."""
        self._none_running = asyncio.Event()

    @abstractmethod
    async def answer(
        self, request: web.BaseRequest, reservation: Reservation
    ) -> web.StreamResponse:
        """Answer a request that is within the bounds; an AnyAgentError becomes the answer."""

    def check(self, request: web.BaseRequest) -> None:
        """Raise PayloadTooLarge or InvalidRequest for a head that is not taken."""
        if sum(map(len, chain.from_iterable(request.raw_headers))) > _MAX_HEADER_BYTES:
            raise PayloadTooLarge(f"the request's headers exceed {_LIMITS}; send shorter ones")
        path = request.raw_path
        # An absolute URL would name another host, and a fragment (#) would not be sent on.
        if not path.startswith("/") or not path.isascii() or "#" in path:
            raise InvalidRequest("the request's path must begin with / and be percent-encoded")

    async def drain(self, within: float) -> None:
        """Refuse new requests, and wait up to ``within`` seconds for those under way."""
        self.draining = True
        if self.stats.running:
            with suppress(TimeoutError):
                async with asyncio.timeout(within):
                    await self._none_running.wait()
        if self.stats.running:
            log.warning("%d requests were not answered in time and are cut off", self.stats.running)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.stats.running += 1
        status = CLIENT_LEFT
        reservation: Reservation | None = None
        try:
            try:
                reservation = self.limits.acquire()
                require_room(request)
                self.check(request)
                if self.draining and not request.path.startswith(_ANSWERED_WHILE_DRAINING):
                    raise Draining(
                        "the service is stopping: it finishes the requests under way and takes no "
                        "new ones; try again",
                        retry_after=5,
                    )
                response = await self.answer(request, reservation)
            except AnyAgentError as error:
                if isinstance(error, ReplyLost):
                    error.repeatable = is_idempotent(request)
                self.stats.refused[error.code] += 1
                response = await self.replies.error(request, error)
            status = response.status
            return response
        except ConnectionError:
            raise
        except Exception:
            status = FAILED
            raise
        finally:
            if reservation is not None:
                reservation.release()
            self.stats.end(request, status)
            if self.draining and not self.stats.running:
                self._none_running.set()


class _Connection(BoundedConnection):
    head_limits = _LIMITS

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Writing pauses as soon as the client takes no more, so that nothing piles up here.
        cast(asyncio.WriteTransport, transport).set_write_buffer_limits(high=0)
        super().connection_made(transport)

    def encode(self, error: AnyAgentError, request: web.BaseRequest, status: int) -> web.Response:
        body, headers = encode_error(error, request.path, status)
        headers = {**headers, hdrs.SERVER: SERVER}
        return web.json_response(body, status=status, headers=headers)


class _Server(BoundedServer):
    connection_type = _Connection


@asynccontextmanager
async def listening(router: Entrance, listener: socket.socket) -> AsyncIterator[None]:
    """Serve requests on a bound socket until the context ends."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(watch_loop_lag(router.stats.loop_lag))
        low_level = _Server(
            router.handle,
            max_line_size=65_536,
            # Each field is bounded before `_check` adds them up.
            max_field_size=_MAX_HEADER_BYTES,
            max_headers=_MAX_HEADERS,
            auto_decompress=False,
        )
        runner = web.ServerRunner(low_level, shutdown_timeout=STOP_SECONDS)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.SockSite(runner, listener, backlog=2048).start()
        yield


def serve(
    running: Callable[[], AbstractAsyncContextManager[Entrance]], drain_timeout: float
) -> None:
    """Serve until SIGINT, or until SIGTERM and a drain of up to ``drain_timeout`` seconds.

    A second signal ends it at once. Signals are handled only in the main thread.
    """
    import uvloop

    async def main() -> None:
        drain, stop = asyncio.Event(), asyncio.Event()

        def on_terminate() -> None:
            (stop if drain.is_set() else drain).set()

        def on_interrupt() -> None:
            drain.set()
            stop.set()

        if threading.current_thread() is threading.main_thread():
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGTERM, on_terminate)
            loop.add_signal_handler(signal.SIGINT, on_interrupt)
        async with running() as router:
            # The present objects stay, so the garbage collector need not scan them again and again.
            gc.collect()
            gc.freeze()
            # Requests leave few cycles behind.
            gc.set_threshold(10_000, 20, 20)
            await drain.wait()
            stopped = asyncio.create_task(stop.wait())
            drained = asyncio.create_task(router.drain(drain_timeout))
            await asyncio.wait({stopped, drained}, return_when=asyncio.FIRST_COMPLETED)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
