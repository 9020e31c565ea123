"""JSON bodies, event streams, and clients that may disconnect."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

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
    try:
        body = await request.body()
    except ClientDisconnect:
        raise InvalidRequest(
            "the connection closed before the body was complete; send it again"
        ) from None
    return await json_of(body)


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


class _SendTimeout:
    """Ends a stream whose client takes too long to read an event: one timer for all events."""

    def __init__(self, seconds: float) -> None:
        self.began: float | None = None
        """Time at which the unread event was sent."""
        self._seconds = seconds
        self._task: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._expired = False

    async def __aenter__(self) -> _SendTimeout:
        self._task = asyncio.current_task()
        self._check()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._expired and kind is asyncio.CancelledError and self._task is not None:
            self._task.uncancel()
            raise TimeoutError("the client does not read its stream")

    def _check(self) -> None:
        waited = time.monotonic() - self.began if self.began is not None else 0.0
        if waited >= self._seconds:
            self._expired = True
            assert self._task is not None
            self._task.cancel()
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._seconds - waited, self._check)


class EventStream(Response):
    """Server-sent events. ``finish`` is awaited whatever happens to the stream."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        headers: Mapping[str, str],
        *,
        finish: Callable[[], Awaitable[None]],
        send_timeout: float,
    ) -> None:
        super().__init__(headers={**headers, "cache-control": "no-cache"})
        del self.headers["content-length"]
        self._events = events
        self._finish = finish
        self._send_timeout = send_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with (
                aclosing(self._events) as events,
                _SendTimeout(self._send_timeout) as timeout,
            ):
                async for event in events:
                    timeout.began = time.monotonic()
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                    timeout.began = None
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._finish()
