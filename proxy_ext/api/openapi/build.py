"""Completes `/openapi.json`, FastAPI's description of the routes.

This module adds every error of a route (behind the router, too), keys, headers, field comments and
examples. `description.json` has the parts that only one route or schema has; the rest follows from
the callers of a route (`proxy_ext.web.permissions`), from its method and its parameters, and from
the registered APIs (`any_agent.completions.apis`).
"""

from __future__ import annotations

import ast
import copy
import inspect
import itertools
from functools import cache
from importlib.resources import files
from types import ModuleType
from typing import Any

import orjson
from fastapi import FastAPI

from any_agent.auth.access import Scope
from any_agent.completions.apis import Api, all_apis, error_format
from any_agent.completions.params.table import request_schema
from any_agent.protocol import interactions, tasks, training
from any_agent.protocol import rl as protocol
from any_agent.protocol.rl import IDEMPOTENCY_KEY
from proxy_ext.api.rl import areal
from proxy_ext.web.permissions import RULES

_RETRY_LATER = (429, 503, 507)  # the statuses whose answers carry `Retry-After`
_LIKE_ANY_CALL = "POST /v1/chat/completions"
"""The route whose errors those of every registered API are."""
_KEYS = {
    "bearer": {
        "type": "http",
        "scheme": "bearer",
        "description": "The operator's key, a key of `any-agent keys`, or a session's `api_key`. A "
        "service without an admin key, on loopback only, requires none.",
    },
    "x_api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    "api_key": {"type": "apiKey", "in": "header", "name": "api-key"},
}
_SESSION_HEADER = {
    "name": "X-Any-Agent-Session",
    "in": "header",
    "description": "The session's id, where the key is not its own.",
    "schema": {"type": "string"},
}
_ROLE_HEADER = {
    "name": "X-Any-Agent-Role",
    "in": "header",
    "description": "The name of the agent, of several in the session, that makes the call.",
    "schema": {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"},
}
_QUERIES = (
    "Every field of a body of `/rl` routes, `/grant_capacity` and `/export_trajectories` may stand "
    "in the query instead, by its name; objects are JSON there. Where body and query differ, and "
    "where a parameter is unknown, the answer is 400. `api_key` has no place in a URL."
)


@cache
def load_description() -> dict[str, Any]:
    """Return `description.json`.

    ``errors``: a text by status. ``routes``: a tag and further statuses by route. ``headers``: the
    headers of recorded answers. ``schemas``: schemas that no model describes; ``x-parameters-of``
    names the API whose parameters a request has. ``operations``: by route, the fields that replace
    FastAPI's. ``rules``: by model, which fields go together. ``examples``: a valid body by model.
    """
    text = files("proxy_ext.api.openapi").joinpath("description.json").read_bytes()
    loaded: dict[str, Any] = orjson.loads(text)
    return loaded


def describe(app: FastAPI) -> None:
    """Make the app's description of itself complete."""
    plain = app.openapi

    def full() -> dict[str, Any]:
        if app.openapi_schema is None:
            _complete(plain())
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = full  # type: ignore[method-assign]


def _complete(schema: dict[str, Any]) -> None:
    texts = copy.deepcopy(load_description())
    for api in all_apis():
        _describe_api(api, texts)
    schemas = schema.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    apis = {api.name: api for api in all_apis()}
    for name, own in texts["schemas"].items():
        owner = apis.get(own.pop("x-parameters-of", ""))
        request = {} if owner is None else request_schema(owner.parameters(), owner.required)
        schemas[name] = {"title": name, **request, **own}
    schema["info"]["description"] = _QUERIES
    schema["components"]["securitySchemes"] = _KEYS
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            _complete_operation(f"{method.upper()} {path}", operation, texts)
    for name, example in texts["examples"].items():
        schemas[name]["examples"] = [example]
    for name, rule in texts["rules"].items():
        schemas[name] |= rule
    for name, comments in _comments(protocol, interactions, tasks, training, areal).items():
        properties = schemas.get(name, {}).get("properties", {})
        for field in comments.keys() & properties.keys():
            properties[field].setdefault("description", comments[field])


def _describe_api(api: Api, texts: dict[str, Any]) -> None:
    """Add the texts of an API that `description.json` does not know."""
    route = f"POST /v1{api.path}"
    if route in texts["routes"]:
        return
    request, answer = f"{api.name}-request", f"{api.name}-answer"
    texts["routes"][route] = texts["routes"][_LIKE_ANY_CALL]
    texts["schemas"][request] = {"x-parameters-of": api.name}
    texts["schemas"][answer] = dict(api.response_schema)
    events = {"text/event-stream": {"schema": {"type": "string"}}}
    texts["operations"][route] = {
        "summary": api.summary or api.name,
        "requestBody": {"required": True, "content": _json(request)},
        "responses": {
            "200": {
                "description": "The answer; with `stream` as events.",
                "x-headers": list(texts["headers"]),
                "content": _json(answer) | events,
            }
        },
    }


def _complete_operation(route: str, operation: dict[str, Any], texts: dict[str, Any]) -> None:
    tag, *particular = texts["routes"][route]
    method, _, path = route.partition(" ")
    scopes = RULES[method, path].scopes
    operation["tags"] = [tag]
    operation |= texts["operations"].get(route, {})
    responses = operation["responses"]
    for response in responses.values():
        if names := response.pop("x-headers", ()):
            known = {name: texts["headers"][name] for name in names}
            response["headers"] = {**known, **response.get("headers", {})}
    # FastAPI's own description of 422, which is not what we answer.
    responses.pop("422", None)
    statuses = {400, 413, 415, 502, 503, *particular}
    if Scope.NONE not in scopes:
        operation["security"] = [{name: []} for name in _KEYS]
        statuses |= {401, 403}
    parameters = operation.setdefault("parameters", [])
    for parameter in parameters:
        _complete_parameter(parameter)
    if 404 in statuses and Scope.SESSION in scopes and "{" not in path:
        parameters.append(_SESSION_HEADER)
    if method == "POST" and path.removeprefix("/v1") in {api.path for api in all_apis()}:
        parameters.append(_ROLE_HEADER)
    if any(parameter["name"] == IDEMPOTENCY_KEY for parameter in parameters):
        statuses |= {409, 422, 507}
    for status in sorted(statuses):
        responses[str(status)] = _error(status, path, texts["errors"][str(status)])
    # Last, so that each of a route's answers stands in the order of its status.
    operation["responses"] = dict(sorted(responses.items()))


def _complete_parameter(parameter: dict[str, Any]) -> None:
    """Remove null from the schema: in a URL or a header a parameter is left out instead."""
    schema = parameter["schema"]
    kinds = [kind for kind in schema.pop("anyOf", ()) if kind != {"type": "null"}]
    if len(kinds) == 1:
        schema |= kinds[0]
    elif kinds:
        schema["anyOf"] = kinds


def _error(status: int, path: str, text: str) -> dict[str, Any]:
    out: dict[str, Any] = {"description": text, "content": _json(error_format(path).schema)}
    if status in _RETRY_LATER:
        seconds = {"type": "integer", "minimum": 1}
        out["headers"] = {"Retry-After": {"description": "Seconds.", "schema": seconds}}
    return out


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}


def _comments(*modules: ModuleType) -> dict[str, dict[str, str]]:
    """Return the comments under models' fields, by model and field; inherited ones, too."""
    found: dict[str, dict[str, str]] = {}
    for node in (node for each in modules for node in ast.parse(inspect.getsource(each)).body):
        if not isinstance(node, ast.ClassDef):
            continue
        comments = found[node.name] = {}
        for base in node.bases:
            comments |= found.get(ast.unparse(base), {})
        for field, below in itertools.pairwise(node.body):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
            ):
                text = inspect.cleandoc(str(below.value.value)).replace("\n", " ")
                comments[field.target.id] = text
    return found
