"""``python -m proxy_ext`` that notes each request that reaches LiteLLM's app, to which it adds a
route that no table knows: ``python -m tests.support.chaos.noting_proxy FILE --config ...``.
"""

from __future__ import annotations

import sys
from typing import Any

from starlette.types import Receive, Scope, Send

from proxy_ext import litellm_proxy
from proxy_ext.__main__ import main
from proxy_ext.litellm_app import ConfiguredLiteLLMApp

NEW_ROUTE = "/of/a/newer/litellm"


def note(file: str) -> None:
    """Note the method and path of each request of LiteLLM's app in a file, one a line."""
    load, call = litellm_proxy.load_proxy, ConfiguredLiteLLMApp.__call__
    notes = open(file, "a", encoding="utf-8", buffering=1)  # noqa: SIM115

    def with_a_new_route(path: str, **more: Any) -> Any:
        app = load(path, **more)
        app.add_api_route(NEW_ROUTE, lambda: "reached", methods=["GET", "POST"])
        return app

    async def noted(app: ConfiguredLiteLLMApp, scope: Scope, receive: Receive, send: Send) -> None:
        notes.write(f"{scope['method']} {scope['path']}\n")
        await call(app, scope, receive, send)

    litellm_proxy.load_proxy = with_a_new_route
    ConfiguredLiteLLMApp.__call__ = noted  # type: ignore[method-assign]


if __name__ == "__main__":
    note(sys.argv.pop(1))
    sys.exit(main())
