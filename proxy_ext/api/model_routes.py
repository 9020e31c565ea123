"""The routes of model calls. They bypass FastAPI, whose layers would cost each a twelfth more."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from any_agent.errors import AnyAgentError
from proxy_ext.api.embeddings import embeddings
from proxy_ext.api.messages import count, messages
from proxy_ext.api.model_call import chat_completions, text_completions
from proxy_ext.api.responses import responses
from proxy_ext.api.rl.dependencies import service_of
from proxy_ext.service import RankService
from proxy_ext.web.exchange import error_response

log = logging.getLogger(__name__)

Handler: TypeAlias = Callable[[RankService, Request], Awaitable[Response]]

HANDLERS: dict[str, Handler] = {
    "/chat/completions": chat_completions,
    "/completions": text_completions,
    "/responses": responses,
    "/messages": messages,
    "/messages/count_tokens": count,
    "/embeddings": embeddings,
}
"""Each under `/v1`, too: clients differ in whether their base URL ends in it."""
_BY_PATH = {prefix + path: handler for path, handler in HANDLERS.items() for prefix in ("/v1", "")}


class ModelRoutes:
    """An ASGI app: ``app``, but for the model calls. `proxy_ext.middleware` stands before it."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app
        for path, handler in _BY_PATH.items():
            # What is there to be described, and says that a GET is not.
            app.add_api_route(
                path, _endpoint(handler), methods=["POST"], include_in_schema=path.startswith("/v1")
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = _BY_PATH.get(scope["path"]) if scope["type"] == "http" else None
        if handler is None or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        request = Request({**scope, "app": self.app}, receive)
        try:
            response = await handler(service_of(request), request)
        except AnyAgentError as error:
            response = error_response(error, scope["path"])
        except Exception:
            log.exception("a model call failed")
            failed = AnyAgentError("the service failed; its log says why")
            response = error_response(failed, scope["path"])
        await response(scope, receive, send)


def _endpoint(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await handler(service_of(request), request)

    endpoint.__name__ = handler.__name__
    return endpoint
