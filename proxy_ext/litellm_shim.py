"""The only file that imports LiteLLM's internals (exactly 1.106.2, see the constraints).

Its app keeps its own start-up and lifespan; it runs behind our routes, not around them: nine
middlewares of its own (gzip, any-origin CORS, admission) would otherwise sit on every stream. It is
imported when it is asked first: that takes ten seconds, which a killed rank would be away longer.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send


def load_app() -> Any:
    """Import LiteLLM's proxy app, set to need no network and no database."""
    # Read at import: prices from the package, not from the network.
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    os.environ.setdefault("LITELLM_LOG", "ERROR")
    # It wants a master key; nobody is ever told this one.
    os.environ["LITELLM_MASTER_KEY"] = f"sk-{secrets.token_hex(24)}"
    for name in ("DATABASE_URL", "CONFIG_FILE_PATH", "WORKER_CONFIG"):
        os.environ.pop(name, None)
    from litellm.proxy import proxy_server

    proxy_server.general_settings["disable_model_info_refresh"] = True
    for name in ("LiteLLM", "LiteLLM Proxy", "LiteLLM Router"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.ERROR)
        # Its own would write past ours, which cuts keys out.
        logger.handlers.clear()
    return proxy_server.app


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
        app: ASGIApp = await asyncio.to_thread(self._load)
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


def lifespan(app: Any) -> AbstractAsyncContextManager[Any]:
    """LiteLLM's own start-up and shutdown."""
    context: AbstractAsyncContextManager[Any] = app.router.lifespan_context(app)
    return context
