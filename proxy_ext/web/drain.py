"""The drain of a rank: requests under way end, and new calls and sessions are refused."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from any_agent.errors import Draining
from proxy_ext.web.exchange import error_response


def draining() -> Draining:
    """Return the error of calls and opens during the drain."""
    return Draining(
        "this rank is stopping: it finishes its present work and starts none; try again",
        retry_after=5,
    )


class InterruptibleApp:
    """An ASGI app around another one, whose requests can be cut off by cancelling their tasks.

    Those get 503, or a broken connection if the answer has begun; later ones get 503 at once.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.cut_off = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = False

        async def sent(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        if not self.cut_off:
            try:
                await self._app(scope, receive, sent)
                return
            except asyncio.CancelledError:
                if not self.cut_off:
                    raise
        # A begun answer is not completed: a client must not mistake it for a whole one.
        if not begun:
            await error_response(draining(), scope["path"])(scope, receive, send)
