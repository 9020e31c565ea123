"""A `/rl` request's query says what its body would: each field by its name, as text.

A field may stand in both if the two say the same. What a URL cannot hold (a reward by name, a list
of objects) stands in it as JSON; a list may also be given by naming its field several times.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl

from fastapi.dependencies.models import Dependant
from pydantic import BaseModel, TypeAdapter, ValidationError

from any_agent.completions.json_body import json_of
from any_agent.errors import InvalidRequest

_MOST = 2048
"""Names in one query: more than the sessions that a lease may name."""
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")
"""Numbers in JSON's form; Python would take `1_0`, too."""
_NOT_FINITE = re.compile(r"[+-]?(nan|inf(inity)?)", re.IGNORECASE)
_LAX: dict[str, TypeAdapter[Any]] = {
    "boolean": TypeAdapter(bool),
    "integer": TypeAdapter(int),
    "number": TypeAdapter(float),
}


class QueryFields:
    """The query fields of one route."""

    def __init__(self, dependant: Dependant) -> None:
        bodies = [kind for field in dependant.body_params if (kind := _model(field))]
        own = [kind for field in dependant.query_params if (kind := _model(field))]
        self._body = {n: k for model in bodies for n, k in _kinds_by_field(model).items()}
        self._own = {n: k for model in own for n, k in _kinds_by_field(model).items()}
        self._path = {field.alias for field in dependant.path_params}
        self.takes_session = "session_id" in {*self._body, *self._own, *self._path}
        """True if the route itself reads the query's session name."""
        self.in_query = bool(own)
        self.in_body = bool(bodies)
        """True if the query's fields belong into the route's body."""

    async def said(self, query: str, path: Mapping[str, Any]) -> dict[str, Any]:
        """The query's fields as a body has them.

        Every route's may name its session. InvalidRequest for a field that the route does not have,
        that is empty, that is said twice in two ways or that is no finite number, and for a key.
        """
        known = {"session_id": {"string"}, **self._body, **self._own}
        out = {}
        for name, texts in _by_name(query).items():
            if name == "api_key":
                # Also where there is no such field: URLs are written into logs.
                raise InvalidRequest(
                    "send api_key in the body of a POST, not in a URL", param="api_key"
                )
            if name in self._path:
                if set(texts) != {str(path[name])}:
                    raise differs(name, "path", "query")
            elif name in self._own and not any(texts):
                # The route reads it itself; clients write parameters without a value as empty ones.
                continue
            elif name in known:
                out[name] = await _value(name, texts, known[name])
            else:
                raise _unknown(name, {*known, *self._path})
        return out


def merged(body: Any, said: Mapping[str, Any]) -> Any:
    """A body with what the query says; InvalidRequest where the two say different things.

    A field that is null says nothing. What is no object stays as it is, to be refused.
    """
    if not isinstance(body, dict):
        return body
    out = dict(body)
    for name, value in said.items():
        given = out.get(name)
        if given is None:
            out[name] = value
        elif isinstance(given, bool) is not isinstance(value, bool) or given != value:
            raise differs(name, "body", "query")
    return out


def differs(name: str, *places: str) -> InvalidRequest:
    """Return the error of a field that has two values."""
    code = "session_mismatch" if name == "session_id" else None
    message = f"{name} differs between {' and '.join(places)}; say it once"
    return InvalidRequest(message, param=name, code=code)


def _unknown(name: str, known: Collection[str]) -> InvalidRequest:
    shown = name[:80]
    near = difflib.get_close_matches(shown, known, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]}?" if near else ""
    if not near:
        hint = f"; this route takes {', '.join(sorted(known))}"
    return InvalidRequest(f"unknown query parameter {shown}{hint}", param=shown)


def _by_name(query: str) -> dict[str, list[str]]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=_MOST)
    except ValueError:
        raise InvalidRequest(f"the query has more than {_MOST} fields") from None
    out: dict[str, list[str]] = {}
    for name, text in pairs:
        out.setdefault(name, []).append(text)
    return out


async def _value(name: str, texts: Sequence[str], kinds: set[str]) -> Any:
    """The value that texts stand for in a field that takes these kinds of JSON."""
    if "" in texts:
        raise InvalidRequest(f"{name} in the query is empty: leave it out", param=name)
    first = texts[0].lstrip()
    if "array" in kinds and not (len(texts) == 1 and first.startswith("[")):
        return list(texts)
    values = [await _one(name, text, kinds) for text in texts]
    if any(value != values[0] for value in values):
        raise InvalidRequest(f"{name} stands in the query with different values", param=name)
    return values[0]


async def _one(name: str, text: str, kinds: set[str]) -> Any:
    start = text.lstrip()[:1]
    if (start == "{" and "object" in kinds) or (start == "[" and "array" in kinds):
        try:
            return await json_of(text.encode())
        except InvalidRequest:
            raise InvalidRequest(
                f"{name} in the query is not valid JSON", param=name, code="invalid_json"
            ) from None
    for kind in (kind for kind in _LAX if kind in kinds):
        if kind != "boolean":
            _require_number(name, text)
        try:
            value = _LAX[kind].validate_python(text)
        except ValidationError:
            # The body's own rules say what is wrong with a text.
            continue
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidRequest(f"{name} must be a finite number", param=name)
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise InvalidRequest(
                f"{name} has more than 64 bits", param=name, code="integer_too_large"
            )
        return value
    return text


def _require_number(name: str, text: str) -> None:
    if _NOT_FINITE.fullmatch(text):
        raise InvalidRequest(f"{name} must be a finite number", param=name)
    if not _NUMBER.fullmatch(text):
        raise InvalidRequest(f"{name} must be a number, such as 1 or -0.5", param=name)


def _model(field: Any) -> type[BaseModel] | None:
    kind = field.field_info.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _kinds_by_field(model: type[BaseModel]) -> dict[str, set[str]]:
    """The kinds of JSON that each field takes, by the model's own description."""
    schema = model.model_json_schema()
    parts = schema.get("$defs", {})
    return {name: set(_kinds(one, parts)) for name, one in schema["properties"].items()}


def _kinds(schema: Mapping[str, Any], parts: Mapping[str, Any]) -> Iterator[str]:
    if "$ref" in schema:
        schema = parts[schema["$ref"].rpartition("/")[2]]
    if "type" in schema:
        yield schema["type"]
    for each in schema.get("anyOf", ()):
        yield from _kinds(each, parts)
