"""Reading JSON bodies, and answers that know whether their client is still there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from any_agent.errors import InvalidRequest

T = TypeVar("T")

MAX_DEPTH = 64
_LONG = 1 << 20
_PARSERS_DEPTH = "depth limit exceeded"
"""What orjson says of more than 1024 levels."""


class JSONResponse(Response):
    """JSON by orjson."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


async def read_json(request: Request) -> Any:
    """The body as JSON; InvalidRequest when it is none (NaN and Infinity are none)."""
    try:
        body = await request.body()
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if error.msg == _PARSERS_DEPTH:
            raise _too_deep(MAX_DEPTH) from None
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except ClientDisconnect:
        raise InvalidRequest("the body did not arrive whole") from None
    if len(body) > _LONG:
        # A second for as many values as there can be: not on the event loop.
        await asyncio.to_thread(require_shallow, data)
    else:
        require_shallow(data)
    return data


def require_shallow(data: Any, limit: int = MAX_DEPTH) -> None:
    """InvalidRequest for JSON that is nested deeper than everything behind us can carry."""
    level = [data]
    for _ in range(limit):
        level = [
            below
            for item in level
            if isinstance(item, dict | list)
            for below in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return
    raise _too_deep(limit)


def _too_deep(limit: int) -> InvalidRequest:
    return InvalidRequest(f"the body is nested deeper than {limit} levels", code="too_deep")


class Client:
    """The other end of one request, watched; ``on_leave`` is called at once when it leaves."""

    def __init__(self, request: Request, on_leave: Callable[[], object]) -> None:
        self._request = request
        self._on_leave = on_leave
        self._task: asyncio.Task[None] | None = None
        self.gone = False

    async def __aenter__(self) -> Client:
        self._task = asyncio.create_task(self._watch())
        return self

    async def look(self) -> None:
        """Notice one that has left already, also where nothing else is waited for."""
        await asyncio.sleep(0)

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            # Not awaited itself: its cancellation must not be taken for the caller's.
            await asyncio.wait([self._task])

    async def _watch(self) -> None:
        while True:
            message = await self._request.receive()
            if message["type"] == "http.disconnect":
                self.gone = True
                self._on_leave()
                return


async def while_present(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await the work, and cancel it if the client leaves: nobody would hear of its result."""
    task = asyncio.ensure_future(work)
    async with Client(request, on_leave=task.cancel):
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            raise InvalidRequest("the client left") from None


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
            async with aclosing(self._events) as events:
                async for event in events:
                    async with asyncio.timeout(self._send_timeout):
                        await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._finish()
