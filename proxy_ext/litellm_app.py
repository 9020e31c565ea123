"""LiteLLM's app, imported at its first request.

The import takes 235 MB and ten seconds of CPU, by which a killed rank would be back later.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from proxy_ext.litellm_shim import lifespan, load_app


class LiteLLMApp:
    """An ASGI app over LiteLLM's, which it loads at its first request."""

    def __init__(self, load: Callable[[], Any] = load_app) -> None:
        self._load = load
        self._started: asyncio.Task[ASGIApp] | None = None
        self._stack = AsyncExitStack()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._started is None:
            self._started = asyncio.create_task(self._start())
        # The first client may leave; other requests wait for the same start.
        app = await asyncio.shield(self._started)
        await app(scope, receive, send)

    async def _start(self) -> ASGIApp:
        try:
            # In a thread, so that streams go on.
            app: ASGIApp = await asyncio.to_thread(self._load)
        except BaseException:
            # The next request tries again.
            self._started = None
            raise
        await self._stack.enter_async_context(lifespan(app))
        # The app's objects stay, as those of the start do.
        gc.freeze()
        return app

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        """Shut LiteLLM's app down at the end, if it was started."""
        try:
            yield
        finally:
            if self._started is not None:
                await asyncio.wait([self._started])
            await self._stack.aclose()
