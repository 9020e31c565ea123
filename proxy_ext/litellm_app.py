"""LiteLLM's app, imported when it is asked first.

That takes ten seconds of CPU, which a killed rank would be away longer, and 235 MB.
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
        # Who asked first may leave; others wait for it, too.
        app = await asyncio.shield(self._started)
        await app(scope, receive, send)

    async def _start(self) -> ASGIApp:
        # Streams go on meanwhile.
        try:
            app: ASGIApp = await asyncio.to_thread(self._load)
        except BaseException:
            # The next request tries again.
            self._started = None
            raise
        await self._stack.enter_async_context(lifespan(app))
        # As what was there at the start: its objects stay.
        gc.freeze()
        return app

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        """Shuts LiteLLM's app down at the end, if it was started."""
        try:
            yield
        finally:
            if self._started is not None:
                await asyncio.wait([self._started])
            await self._stack.aclose()
