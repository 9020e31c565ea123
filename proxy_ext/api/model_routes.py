"""The routes of model calls. They bypass FastAPI, whose layers would cost each a twelfth more."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeAlias

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from any_agent.completions.apis import all_apis
from any_agent.errors import AnyAgentError
from proxy_ext.api.messages import count
from proxy_ext.api.model_call import serve_model_call
from proxy_ext.api.rl.dependencies import service_of
from proxy_ext.service import RankService
from proxy_ext.web.exchange import error_response
from proxy_ext.web.permissions import allow_model_calls

log = logging.getLogger(__name__)

Handler: TypeAlias = Callable[[RankService, Request], Awaitable[Response]]


def model_call_handlers() -> dict[str, Handler]:
    """Return the handlers of the registered APIs by path. Each is served under `/v1`, too: clients
    differ in whether their base URL ends in it."""
    calls = {api.path: partial(serve_model_call, api=api) for api in all_apis()}
    return {**calls, "/messages/count_tokens": count}


class ModelRoutes:
    """An ASGI app that answers model calls and passes everything else to ``app``.

    `proxy_ext.middleware` stands before it.
    """

    def __init__(self, app: FastAPI) -> None:
        self.app = app
        self._handlers: dict[str, Handler] = {}
        for path, handler in model_call_handlers().items():
            allow_model_calls(path)
            for prefix in ("/v1", ""):
                self._handlers[prefix + path] = handler
                # The app describes the route, and answers its other methods.
                app.add_api_route(
                    prefix + path,
                    _endpoint(handler, path),
                    methods=["POST"],
                    include_in_schema=bool(prefix),
                )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._handlers.get(scope["path"]) if scope["type"] == "http" else None
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


def _endpoint(handler: Handler, path: str) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await handler(service_of(request), request)

    endpoint.__name__ = path.strip("/").replace("/", "_")
    return endpoint
