"""The only file that imports LiteLLM's internals (exactly 1.106.2, see the constraints).

Its app keeps its own start-up and lifespan; it runs behind our routes, not around them: nine
middlewares of its own (gzip, any-origin CORS, admission) would otherwise sit on every stream.
"""

from __future__ import annotations

import logging
import os
import secrets
from contextlib import AbstractAsyncContextManager
from typing import Any


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


def lifespan(app: Any) -> AbstractAsyncContextManager[Any]:
    """LiteLLM's own start-up and shutdown."""
    context: AbstractAsyncContextManager[Any] = app.router.lifespan_context(app)
    return context
