"""What FastAPI cannot know of our routes, added to its description of them: `/openapi.json`.

Every error that a route can answer (behind the router, too), keys, headers, the fields' comments,
examples. One table says what is particular to a route; the rest follows from who may use it
(`scopes.py`), from its method, and from its dependencies.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute, iter_route_contexts

from any_agent.auth.access import Scope
from any_agent.protocol import rl as protocol
from any_agent.protocol.error_bodies import is_messages
from proxy_ext.api.openapi.schemas import BODIES, EXAMPLES, PAGES, RULES_BETWEEN, SCHEMAS
from proxy_ext.api.rl import areal, areal_export
from proxy_ext.api.rl.dependencies import receipt_of
from proxy_ext.web.permissions import RULES

_ERRORS = {
    400: "The request is malformed; `param` names the field.",
    401: "No key, or one that is not valid here.",
    402: "What the session or the tenant may spend on frozen models is spent.",
    403: "The key is not good for this route.",
    404: "There is no such session, completion or model, or it is not the caller's.",
    409: "It contradicts the state of the session, the group or the run.",
    410: "The session is over; `state` says how it ended.",
    413: "The body or the headers are too large.",
    422: "Well-formed, but it cannot be done; or the Idempotency-Key came with another request.",
    429: "No slot, no place or no quota is left; try again after `Retry-After` seconds.",
    502: "The rank died before it answered: whether it did what was asked is not known. Of a "
    "frozen model: what its provider says is no answer, or it refuses this service.",
    503: "The rank, its engine or its store cannot answer now.",
    504: "The provider of a frozen model took too long.",
    507: "The store's disk is full.",
}
_WAITING = (429, 503, 507)
"""They say when to try again."""

_MODEL_CALL = "402 404 409 410 429 504 507"
_TABLE: dict[str, tuple[str, str]] = {
    # Tag, and what else it answers than its kind does.
    "POST /v1/chat/completions": ("model calls", _MODEL_CALL),
    "POST /v1/completions": ("model calls", _MODEL_CALL),
    "POST /v1/responses": ("model calls", _MODEL_CALL),
    "GET /v1/responses/{response_id}": ("model calls", "404"),
    "DELETE /v1/responses/{response_id}": ("model calls", "404 409 410 507"),
    "GET /v1/responses/{response_id}/input_items": ("model calls", "404"),
    "POST /v1/messages": ("model calls", _MODEL_CALL),
    "POST /v1/messages/count_tokens": ("model calls", "404 410 429"),
    "POST /v1/embeddings": ("model calls", _MODEL_CALL),
    "GET /v1/models": ("model calls", ""),
    "GET /v1/models/{model}": ("model calls", "404"),
    "POST /rl/v1/start_session": ("agents", "409 429 507"),
    "GET /rl/v1/start_session": ("agents", "409 429 507"),
    "POST /rl/v1/set_reward": ("agents", "404 410 507"),
    "POST /rl/v1/finalize": ("agents", "404 409 410 507"),
    "GET /rl/v1/sessions": ("agents", ""),
    "GET /rl/v1/sessions/{session_id}": ("agents", "404"),
    "GET /rl/v1/sessions/{session_id}/content": ("agents", "404 409"),
    "DELETE /rl/v1/sessions/{session_id}": ("agents", "404 409 410 507"),
    "POST /rl/v1/sessions/{session_id}/heartbeat": ("agents", "404 410 507"),
    "POST /rl/v1/sessions/{session_id}/abort": ("agents", "404 409 410 507"),
    "POST /rl/v1/sessions/{session_id}/veto": ("agents", "404 409 410 507"),
    "GET /rl/v1/run": ("agents", "404"),
    "PUT /rl/v1/run": ("trainer", "409 507"),
    "GET /rl/v1/version": ("agents", "404"),
    "POST /rl/v1/version": ("trainer", "409 507"),
    "POST /rl/v1/pause": ("trainer", "409 507"),
    "POST /rl/v1/resume": ("trainer", "409 507"),
    "GET /rl/v1/capacity": ("trainer", ""),
    "PUT /rl/v1/capacity": ("trainer", "409 507"),
    "POST /rl/v1/lease": ("trainer", "404 409 410 507"),
    "POST /rl/v1/ack": ("trainer", "404 409 410 507"),
    "POST /rl/v1/export_trajectories": ("trainer", "404 409 410 422 507"),
    "POST /grant_capacity": ("as AReaL has it", "507"),
    "POST /rl/start_session": ("as AReaL has it", "409 422 429 507"),
    "POST /rl/set_reward": ("as AReaL has it", "404 410 507"),
    "POST /rl/end_session": ("as AReaL has it", "404 409 410 507"),
    "POST /export_trajectories": ("as AReaL has it", "404 409 410 422 507"),
    "GET /health": ("as AReaL has it", ""),
    "GET /healthz": ("operations", ""),
    "GET /readyz": ("operations", ""),
    "GET /metrics": ("operations", ""),
}
_KEYS = {
    "bearer": {
        "type": "http",
        "scheme": "bearer",
        "description": "The operator's key, a key of `any-agent keys`, or a session's `api_key`. A "
        "service without an admin key, on loopback only, asks for none.",
    },
    "x_api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_SESSION_HEADER = {
    "name": "X-Any-Agent-Session",
    "in": "header",
    "description": "The session's id, where the key is not its own.",
    "schema": {"type": "string"},
}
_IDEMPOTENCY_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "description": "The same request with the same key has the first answer again, for 24 hours.",
    "schema": {"type": "string", "pattern": "^[!-~]{1,255}$"},
}

_QUERIES = (
    "Every field of a body of `/rl` routes, `/grant_capacity` and `/export_trajectories` may stand "
    "in the query instead, by its name; objects are JSON there. Where body and query differ, and "
    "where a parameter is unknown, the answer is 400. `api_key` has no place in a URL."
)


def describe(app: FastAPI) -> None:
    """Have the app describe itself in full."""
    plain = app.openapi

    def full() -> dict[str, Any]:
        if app.openapi_schema is None:
            _complete(plain(), once=_with_receipt(app))
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = full  # type: ignore[method-assign]


def _complete(schema: dict[str, Any], *, once: set[str]) -> None:
    schemas = schema.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas |= SCHEMAS
    schema["info"]["description"] = _QUERIES
    schema["components"]["securitySchemes"] = _KEYS
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            route = f"{method.upper()} {path}"
            _complete_operation(route, operation, once=route in once)
    for name, example in EXAMPLES.items():
        schemas[name]["examples"] = [example]
    for name, rule in RULES_BETWEEN.items():
        schemas[name] |= rule
    _close_maps(schemas)
    for module in (protocol, areal, areal_export):
        _add_comments(schemas, inspect.getsource(module))


def _complete_operation(route: str, operation: dict[str, Any], *, once: bool) -> None:
    tag, particular = _TABLE[route]
    method, _, path = route.partition(" ")
    scopes = RULES[method, path].scopes
    operation["tags"] = [tag]
    operation |= BODIES.get(route, {})
    responses = operation["responses"]
    # FastAPI's own, which is not what we answer.
    responses.pop("422", None)
    statuses = {400, 413, 502, 503, *map(int, particular.split())}
    if Scope.NONE not in scopes:
        operation["security"] = [{name: []} for name in _KEYS]
        statuses |= {401, 403}
    parameters = operation.setdefault("parameters", [])
    for parameter in parameters:
        _complete_parameter(parameter)
    if 404 in statuses and Scope.SESSION in scopes and "{" not in path:
        parameters.append(_SESSION_HEADER)
    if once:
        parameters.append(_IDEMPOTENCY_KEY)
        statuses |= {409, 422, 507}
    for status in sorted(statuses):
        responses[str(status)] = _error(status, path)
    # Last, so that each of a route's answers stands in the order of its status.
    operation["responses"] = dict(sorted(responses.items()))


def _complete_parameter(parameter: dict[str, Any]) -> None:
    """What stands in a URL or a header is never null: it is left out."""
    schema = parameter["schema"]
    kinds = [kind for kind in schema.pop("anyOf", ()) if kind != {"type": "null"}]
    if len(kinds) == 1:
        schema |= kinds[0]
    elif kinds:
        schema["anyOf"] = kinds
    if parameter["name"] == "after":
        schema.setdefault("pattern", PAGES)


def _close_maps(schema: Any) -> None:
    """Where names have a pattern, no others are taken."""
    if isinstance(schema, dict) and "patternProperties" in schema:
        schema["additionalProperties"] = False
        schema["minProperties"] = 1
    for below in schema.values() if isinstance(schema, dict) else schema:
        if isinstance(below, dict | list):
            _close_maps(below)


def _error(status: int, path: str) -> dict[str, Any]:
    name = "AnthropicError" if is_messages(path) else "Error"
    shape = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    out: dict[str, Any] = {"description": _ERRORS[status], "content": shape}
    if status in _WAITING:
        seconds = {"type": "integer", "minimum": 1}
        out["headers"] = {"Retry-After": {"description": "Seconds.", "schema": seconds}}
    return out


def _with_receipt(app: FastAPI) -> set[str]:
    """The routes that take an Idempotency-Key: those that depend on a receipt."""
    found = set()
    for context in iter_route_contexts(app.routes):
        route = context.original_route
        if isinstance(route, APIRoute) and any(
            each.call is receipt_of for each in _dependants(route.dependant)
        ):
            found |= {f"{method} {context.path}" for method in context.methods or ()}
    return found


def _dependants(top: Dependant) -> Iterator[Dependant]:
    yield top
    for each in top.dependencies:
        yield from _dependants(each)


def _add_comments(schemas: dict[str, Any], source: str) -> None:
    """The comment under a model's field is its description."""
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef) or node.name not in schemas:
            continue
        properties = schemas[node.name].get("properties", {})
        for field, below in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and field.target.id in properties
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
            ):
                text = inspect.cleandoc(str(below.value.value)).replace("\n", " ")
                properties[field.target.id].setdefault("description", text)
