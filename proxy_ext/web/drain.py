"""The drain of a rank: requests under way end, and new calls and sessions are refused."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from any_agent.errors import Draining
from proxy_ext.web.exchange import error_response


def draining() -> Draining:
    """Return the error of calls and opens during the drain."""
    return Draining(
        "this rank is stopping: it finishes its present work and starts none; try again",
        retry_after=5,
    )


class InFlightCounter:
    """An ASGI app around another one, which tracks its requests and can cancel them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._tasks: set[asyncio.Task[Any] | None] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._cancelled = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        task = asyncio.current_task()
        self._tasks.add(task)
        self._idle.clear()
        try:
            await self._answer(scope, receive, send)
        finally:
            self._tasks.discard(task)
            if not self._tasks:
                self._idle.set()

    async def wait_until_idle(self, seconds: float) -> bool:
        """Wait up to ``seconds`` until no request is under way; return whether none is.

        Requests that come meanwhile are answered, too.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        return self._idle.is_set()

    def cancel_all(self) -> int:
        """End all requests: with 503, or a broken connection if the answer has begun.

        Return their number.
        """
        self._cancelled = True
        for task in self._tasks:
            if task is not None:
                task.cancel()
        return len(self._tasks)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def sent(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        if not self._cancelled:
            try:
                await self._app(scope, receive, sent)
                return
            except asyncio.CancelledError:
                if not self._cancelled:
                    raise
        # A begun answer is not completed: a client must not mistake it for a whole one.
        if not begun:
            await error_response(draining(), scope["path"])(scope, receive, send)
