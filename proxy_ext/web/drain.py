"""The end of a rank's proxy: what is under way ends, and nothing new begins."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from any_agent.errors import Draining
from proxy_ext.web.exchange import send_error


def draining() -> Draining:
    """What a call or an open is told meanwhile."""
    return Draining(
        "this rank is stopping: it ends what is under way and begins nothing new; try again",
        retry_after=5,
    )


class InFlightCounter:
    """An ASGI app around another one, which knows its requests and can cut them off."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._tasks: set[asyncio.Task[Any] | None] = set()
        self._none = asyncio.Event()
        self._none.set()
        self._cut = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        task = asyncio.current_task()
        self._tasks.add(task)
        self._none.clear()
        try:
            await self._answer(scope, receive, send)
        finally:
            self._tasks.discard(task)
            if not self._tasks:
                self._none.set()

    async def none(self, within: float) -> bool:
        """Wait until none is under way, but no longer than ``within`` seconds; whether that came.

        Requests that come meanwhile are answered, too.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                await self._none.wait()
        return self._none.is_set()

    def cut(self) -> int:
        """End what is under way: with 503, or a broken connection if the answer has begun."""
        self._cut = True
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

        if not self._cut:
            try:
                await self._app(scope, receive, sent)
                return
            except asyncio.CancelledError:
                if not self._cut:
                    raise
        # What has begun is not ended: a client must not take it for whole.
        if not begun:
            await send_error(send, draining(), scope["path"])
