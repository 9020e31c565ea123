"""JSON bodies, event streams, and clients that may disconnect."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from any_agent.completions.apis import encode_error
from any_agent.completions.json_body import json_of
from any_agent.errors import AnyAgentError, InvalidRequest

T = TypeVar("T")


class JSONResponse(Response):
    """A JSON response made by orjson."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


def error_response(error: AnyAgentError, path: str, status: int | None = None) -> Response:
    """Return an error in the shape of its path's API, with its own status or the given one."""
    body, headers = encode_error(error, path, status)
    return JSONResponse(body, status_code=status or error.status, headers=headers)


async def read_json(request: Request) -> Any:
    """Return the body as JSON; InvalidRequest or PayloadTooLarge as in :func:`json_of`."""
    return await json_of(await read_body(request))


async def read_body(request: Request) -> bytes:
    """Return the whole body; InvalidRequest if the client left before its end."""
    try:
        return await request.body()
    except ClientDisconnect:
        raise InvalidRequest(
            "the connection closed before the body was complete; send it again"
        ) from None


class ClientConnection:
    """Watches the client of one request, and calls ``on_leave`` when it disconnects."""

    def __init__(self, request: Request, on_leave: Callable[[], object]) -> None:
        self._request = request
        self._on_leave = on_leave
        self._task: asyncio.Task[None] | None = None
        self.gone = False

    async def __aenter__(self) -> ClientConnection:
        self._task = asyncio.create_task(self._watch())
        return self

    async def poll(self) -> None:
        """Let a disconnect that has happened already be noticed."""
        await asyncio.sleep(0)

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            # Awaited by `wait`: its cancellation must not be mistaken for the caller's.
            await asyncio.wait([self._task])

    async def _watch(self) -> None:
        while True:
            message = await self._request.receive()
            if message["type"] == "http.disconnect":
                self.gone = True
                self._on_leave()
                return


async def while_present(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await the work, and cancel it if the client leaves; InvalidRequest then."""
    task = asyncio.ensure_future(work)
    async with ClientConnection(request, on_leave=task.cancel):
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            raise InvalidRequest("the client left") from None


HOLD_SECONDS = 1.0
"""Seconds for which a stream's headers wait for its first event: what fails by then is an HTTP
error."""
PING_SECONDS = 10.0
"""Seconds of silence after which a stream's client gets a ping."""


async def within_hold(first: Awaitable[T]) -> T | None:
    """Return a stream's first item, or None if its headers are not to wait for it any longer."""
    try:
        async with asyncio.timeout(HOLD_SECONDS):
            return await first
    except TimeoutError:
        return None


class _StreamWatch:
    """One timer for all events of a stream.

    It pings a client that gets no event for a while, and ends the stream of a client that takes too
    long to read one.
    """

    def __init__(self, seconds: float, ping: Callable[[], Awaitable[None]]) -> None:
        self.began: float | None = None
        """Time at which the unread event was sent."""
        self.sent = time.monotonic()
        """Time at which the last event was sent."""
        self._seconds = seconds
        self._ping = ping
        self._pinging: asyncio.Task[None] | None = None
        self._task: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._expired = False

    async def __aenter__(self) -> _StreamWatch:
        self._task = asyncio.current_task()
        self._check()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._pinging is not None and not self._pinging.done():
            self._pinging.cancel()
            await asyncio.wait([self._pinging])
        if self._expired and kind is asyncio.CancelledError and self._task is not None:
            self._task.uncancel()
            raise TimeoutError("the client does not read its stream")

    def _check(self) -> None:
        now = time.monotonic()
        waited = now - self.began if self.began is not None else 0.0
        if waited >= self._seconds:
            self._expired = True
            assert self._task is not None
            self._task.cancel()
            return
        if self.began is None and now - self.sent >= PING_SECONDS:
            self.began = self.sent = now
            self._pinging = asyncio.create_task(self._send_ping(now))
        next_ping = max(0.0, self.sent + PING_SECONDS - now) or PING_SECONDS
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(min(self._seconds - waited, next_ping), self._check)

    async def _send_ping(self, began: float) -> None:
        await self._ping()
        if self.began == began:
            self.began = None


class EventStream(Response):
    """Server-sent events. ``finish`` is awaited whatever happens to the stream.

    The headers leave at once; ``ping`` is sent to a client that gets nothing for a while.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        headers: Mapping[str, str],
        *,
        finish: Callable[[], Awaitable[None]],
        send_timeout: float,
        ping: bytes,
    ) -> None:
        super().__init__(headers={**headers, "cache-control": "no-cache"})
        del self.headers["content-length"]
        self._events = events
        self._finish = finish
        self._send_timeout = send_timeout
        self._ping = ping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with (
                aclosing(self._events) as events,
                _StreamWatch(self._send_timeout, partial(send, _part(self._ping))) as watch,
            ):
                async for event in events:
                    watch.began = watch.sent = time.monotonic()
                    await send(_part(event))
                    watch.began = None
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._finish()


def _part(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}
