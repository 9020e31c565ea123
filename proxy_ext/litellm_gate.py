"""LiteLLM's own routes in a rank whose operator has a configuration of it: by scope, with the
policy among its models."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import orjson
from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from any_agent.auth.access import Scope as KeyScope
from any_agent.completions.json_body import json_of
from any_agent.errors import AnyAgentError, InvalidRequest, NotFound, ServiceUnavailable
from proxy_ext.frozen.app_call import CONFIGURATION, litellm_scope
from proxy_ext.frozen.provider_requests import require_one_model, require_passed
from proxy_ext.frozen.route_call import RouteCall, without_browsers
from proxy_ext.litellm_app import ConfiguredLiteLLMApp
from proxy_ext.litellm_proxy import CALLER_SCOPE_KEY
from proxy_ext.service import RankService
from proxy_ext.web.exchange import error_response, read_body
from proxy_ext.web.permissions import LITELLM_SCOPES, LiteLLMRoutes, RouteRule

log = logging.getLogger(__name__)

_PROVIDER = "any-agent"
_ABOUT_BODY = (b"content-type", b"content-length")
_MODELS = ("/v1/models", "/models")
_HEALTH = "/health"
_ABOUT_MODELS = (
    "/model/info",
    "/v1/model/info",
    "/v2/model/info",
    "/model_group/info",
    *_MODELS,
    _HEALTH,
)
"""The routes in whose answers the policy is a model like LiteLLM's."""


class LiteLLMGate:
    """Passes checked requests to LiteLLM's app."""

    def __init__(self, app: ConfiguredLiteLLMApp, service: Callable[[], RankService]) -> None:
        self._app = app
        self._service = service
        self._routes = LiteLLMRoutes()

    def rule(self, method: str, path: str) -> tuple[str, RouteRule] | None:
        """Return the template and the rule of one of LiteLLM's routes; None for other paths."""
        return self._routes.rule(method, path)

    def takes_over(self, request: Request) -> bool:
        """Return whether LiteLLM answers one of our own routes here."""
        path = request.url.path
        if request.method != "GET" or self._app.problem is not None:
            return False
        if path == _HEALTH:
            # Everybody else gets AReaL's sign of life.
            with suppress(AnyAgentError):
                return self._service().auth.caller(request).scope is KeyScope.ADMIN
            return False
        if path in _MODELS:
            return True
        named = re.fullmatch(r"(?:/v1)?/models/(.+)", path)
        return named is not None and named[1] not in self._service().frozen.policy.known

    async def serve(self, rule: RouteRule, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request whose key is good for the route's rule."""
        request = Request(scope, receive)
        path: str = scope["path"]
        try:
            await self._app.require()
            service = self._service()
            caller = service.auth.caller(request)
            session = None
            if caller.scope is not KeyScope.ADMIN or caller.tenant is not None:
                session = await service.auth.session_or_none(request)
            tenant = session.row.tenant if session is not None else caller.tenant
            inner = litellm_scope(scope, path, caller, session, tenant)
            infers = rule.scopes == LITELLM_SCOPES["inference"]
            if infers:
                await service.frozen.spending.require(session, tenant)
            if infers and scope["method"] == "POST":
                await service.quotas.require_tokens(tenant)
                body = await read_body(request)
                if not inner[CALLER_SCOPE_KEY].admin:
                    inner, body = await self._agents(inner, request, body)
                call = RouteCall(self._app, inner, body, send, session, tenant)
                await asyncio.shield(service.frozen.start_elsewhere(call))
                return
        except AnyAgentError as error:
            await error_response(error, path)(scope, receive, send)
            return

        async def passed(message: Message) -> None:
            begins = message["type"] == "http.response.start"
            await send(without_browsers(message) if begins else message)

        if scope["method"] == "GET" and path in _ABOUT_MODELS:
            await self._with_policy(path, inner, receive, passed)
        else:
            await self._pass_on(inner, receive, passed)

    async def _agents(self, scope: Scope, request: Request, body: bytes) -> tuple[Scope, bytes]:
        """Return an agent's request and its body, which has been checked.

        Raises InvalidRequest, UnsupportedParameter or NotFound (`model_not_found`).
        """
        # LiteLLM, too, tells a form by this word.
        if "form" in request.headers.get("content-type", ""):
            fields = await _form(request, body)
            headers = scope["headers"]
        else:
            fields = await json_of(body)
            body = orjson.dumps(fields)
            headers = [(k, v) for k, v in scope["headers"] if k not in _ABOUT_BODY]
            headers += zip(_ABOUT_BODY, (b"application/json", str(len(body)).encode()), strict=True)
        if not isinstance(fields, dict):
            raise InvalidRequest("the body must be a JSON object")
        require_passed(None, fields, CONFIGURATION)
        name = fields.get("model")
        if not isinstance(name, str):
            raise InvalidRequest("model must be the name of a model", param="model")
        require_one_model(name)
        if not await self._app.knows(name):
            raise NotFound(
                f"LiteLLM's configuration has no model {name[:80]!a}",
                code="model_not_found",
                param="model",
            )
        return {**scope, "headers": headers}, body

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and answer 503 where LiteLLM fails before it answers."""
        begun = False

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as error:
            # Some of its routes raise where a package or a database is missing.
            log.warning("LiteLLM failed at %s: %s: %s", scope["path"], type(error).__name__, error)
            if not begun:
                failed = ServiceUnavailable(
                    "LiteLLM has no database, or failed in this route: the rank's log has the "
                    "reason",
                    code="litellm_failed",
                )
                await error_response(failed, scope["path"])(scope, receive, send)

    async def _with_policy(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Add the policy to an answer that lists models."""
        start: Message = {}
        parts: list[bytes] = []

        async def keep(message: Message) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
            elif message["type"] == "http.response.body":
                parts.append(message.get("body", b""))

        await self._pass_on(scope, receive, keep)
        body = b"".join(parts)
        if start["status"] == 200:
            with suppress(orjson.JSONDecodeError, AttributeError, KeyError, TypeError):
                answer = orjson.loads(body)
                if not scope[CALLER_SCOPE_KEY].admin:
                    _hide_places(answer)
                body = orjson.dumps(self._listed(path, answer))
        headers = [(k, v) for k, v in start["headers"] if k != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await send({**start, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _listed(self, path: str, answer: dict[str, Any]) -> dict[str, Any]:
        service = self._service()
        name, context = service.config.model.name, service.completer.context_length
        prices = service.config.litellm
        about = {
            "id": f"{_PROVIDER}-policy",
            "mode": "chat",
            "litellm_provider": _PROVIDER,
            "max_tokens": context,
            "max_input_tokens": context,
            "input_cost_per_token": prices.policy_input_cost_per_token,
            "output_cost_per_token": prices.policy_output_cost_per_token,
            "version": service.run.version,
            "db_model": False,
        }
        if path == _HEALTH:
            state = "unhealthy" if service.engine.away else "healthy"
            endpoint = {"model": name, "version": service.run.version}
            answer[f"{state}_endpoints"].append(endpoint)
            answer[f"{state}_count"] += 1
            return answer
        if path in _MODELS:
            own: dict[str, Any] = {"id": name, "object": "model", "created": 0}
            entry = {**own, "owned_by": _PROVIDER, "context_length": context}
        elif path == "/model_group/info":
            entry = {"model_group": name, "providers": [_PROVIDER], **about}
        else:
            params = {"model": f"{_PROVIDER}/{name}"}
            entry = {"model_name": name, "litellm_params": params, "model_info": about}
        answer["data"] = [entry, *answer["data"]]
        if "total_count" in answer:
            answer["total_count"] += 1
        return answer


def _hide_places(answer: dict[str, Any]) -> None:
    """Leave of the parameters of each listed model its name alone: not where it is served."""
    for entry in answer["data"]:
        if "litellm_params" in entry:
            entry["litellm_params"] = {"model": entry["litellm_params"].get("model")}


async def _form(request: Request, body: bytes) -> dict[str, Any]:
    """Return a form's fields by their names; InvalidRequest for one that cannot be read."""
    scope = {k: v for k, v in request.scope.items() if k != "app"}
    try:
        async with Request(scope, _replayed(body, request.receive)).form() as form:
            pairs = form.multi_items()
    except (MultiPartException, KeyError) as error:
        raise InvalidRequest(f"the form cannot be read: {error}") from None
    fields = {name.removesuffix("[]"): value for name, value in pairs}
    if sum(name == "model" for name, _ in pairs) > 1:
        raise InvalidRequest("the form names two models", param="model")
    return fields


def _replayed(body: bytes, receive: Receive) -> Receive:
    parts = [body]

    async def replayed() -> Message:
        if parts:
            return {"type": "http.request", "body": parts.pop(), "more_body": False}
        return await receive()

    return replayed
