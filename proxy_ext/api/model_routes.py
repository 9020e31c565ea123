"""The routes of model calls, of counted tokens, and of models.

Model calls bypass FastAPI, whose layers would cost each a twelfth more.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeAlias

from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from any_agent.completions.apis import all_apis
from any_agent.completions.messages.parse import parse_count
from any_agent.completions.prepare import count_tokens, parse_body
from any_agent.errors import AnyAgentError, InvalidRequest, NotFound
from any_agent.protocol.error_bodies import REQUEST_ID, request_id
from any_agent.types import SessionMode
from proxy_ext.api.model_call import parse_context, serve_model_call
from proxy_ext.api.rl.strict_body import Anyone, service_of
from proxy_ext.calls.concurrency_limit import CallOwner
from proxy_ext.service import RankService
from proxy_ext.web.exchange import JSONResponse, error_response, read_json
from proxy_ext.web.permissions import allow_model_calls

log = logging.getLogger(__name__)
router = APIRouter()
_ANTHROPIC = "anthropic-version"
"""The header that all of Anthropic's clients send."""
_UNKNOWN_TIME = "1970-01-01T00:00:00Z"

Handler: TypeAlias = Callable[[RankService, Request], Awaitable[Response]]


def model_call_handlers() -> dict[str, Handler]:
    """Return the handlers of the registered APIs by path.

    Each is served under `/v1`, too: the base URLs of some clients end in it.
    """
    calls = {api.path: partial(serve_model_call, api=api) for api in all_apis()}
    return {**calls, "/messages/count_tokens": count_call}


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
            failed = AnyAgentError("the call failed inside the service; see its log")
            response = error_response(failed, scope["path"])
        await response(scope, receive, send)


def _endpoint(handler: Handler, path: str) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await handler(service_of(request), request)

    endpoint.__name__ = path.strip("/").replace("/", "_")
    return endpoint


async def count_call(service: RankService, request: Request) -> Response:
    """Count the tokens of a call with this body, in Anthropic's form; sample and record nothing."""
    named = request.query_params.get("session_id")
    session = await service.auth.session_or_none(request, named)
    if session is not None:
        session.require_open()
        owner = CallOwner(session.id, session.row.tenant)
    else:
        owner = CallOwner(None, service.auth.caller(request).tenant)
    service.calls.require_slot(owner)
    body = await read_json(request)
    if await service.frozen.is_named_by(body):
        raise InvalidRequest(
            "only the policy's tokens are counted here: a frozen model's provider counts its own, "
            "and reports them in its answers' usage",
            param="model",
        )
    slot = service.calls.acquire_slot(owner)
    try:
        parse = partial(parse_count, body, parse_context(service, None, SessionMode.EVAL))
        call = (await parse_body(parse, len(await request.body()))).chat
        with service.sessions.trees.pinned(session) if session is not None else nullcontext():
            if session is not None:
                await service.sessions.load(session)
            tree = session.tree if session is not None else None
            await service.calls.render_turns.wait()
            tokens = await count_tokens(service.completer, call, tree)
        return JSONResponse({"input_tokens": tokens}, headers={REQUEST_ID: request_id()})
    finally:
        slot.release()


@router.get("/models", name="models")
async def list_models(service: Anyone, request: Request) -> Response:
    """Return all models, the policy first, in OpenAI's form or, for its clients, in Anthropic's."""
    models = _models(service)
    if _ANTHROPIC not in request.headers:
        return JSONResponse({"object": "list", "data": models})
    ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"]}
    return JSONResponse({"data": [*map(_for_anthropic, models)], "has_more": False, **ends})


@router.get("/models/{model}", name="model")
async def one_model(model: str, service: Anyone, request: Request) -> Response:
    """Return one model by its name; NotFound for another name, though calls may use any."""
    policy, *frozen = _models(service)
    for known in (policy, *frozen):
        if known["id"] == model:
            anthropic = _ANTHROPIC in request.headers
            return JSONResponse(_for_anthropic(known) if anthropic else known)
    others = "".join(f", {known['id']!a}" for known in frozen[:8])
    raise NotFound(
        f"there is no model {model[:80]!a}; the policy is called {policy['id']!a}"
        + (f", and there are{others[1:]}" if others else ""),
        code="model_not_found",
        param="model",
    )


def _for_anthropic(model: dict[str, Any]) -> dict[str, Any]:
    # The beginning of time stands for a date that is not known, in both forms.
    name = model["id"]
    return {"type": "model", "id": name, "display_name": name, "created_at": _UNKNOWN_TIME}


def _models(service: RankService) -> list[dict[str, Any]]:
    policy, adapters = service.config.model.name, service.frozen.policy.adapters
    owners = dict.fromkeys((policy, *adapters), "any-agent") | dict.fromkeys(
        service.frozen.names, "frozen"
    )
    models: list[dict[str, Any]] = [
        {"id": name, "object": "model", "created": 0, "owned_by": owner}
        for name, owner in owners.items()
    ]
    ours = models[: 1 + len(adapters)]
    for model in ours:
        model["context_length"] = service.completer.context_length
    for model in ours[1:]:
        # As vLLM tells an adapter's base.
        model["parent"] = policy
    return models
