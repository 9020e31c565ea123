"""The dependencies and the requests of the `/rl` routes: strict JSON, and queries as bodies.

The standard library's parser, FastAPI's choice, accepts NaN, Infinity, 1e400 and lone surrogates,
and reports deep nesting as invalid JSON. A query may have the fields of the body by name, as texts.
A field may be in both with the same value. A value that a URL cannot hold (a reward by name, a list
of objects) is JSON there; a list may also be given by several fields of its name.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Annotated, Any
from urllib.parse import parse_qs, urlencode

from fastapi import Depends, Header
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from any_agent.auth.access import Caller
from any_agent.completions.json_body import json_of
from any_agent.errors import InvalidRequest
from any_agent.protocol.rl import IDEMPOTENCY_KEY
from proxy_ext.idempotency import Receipt
from proxy_ext.journal.base import KeepAnswer, no_receipt
from proxy_ext.service import RankService
from proxy_ext.web.exchange import read_json


def service_of(request: Request) -> RankService:
    service: RankService = request.app.state.service
    return service


# FastAPI runs plain functions in threads, which costs more than these do.
async def _service(request: Request) -> RankService:
    return service_of(request)


async def _caller(request: Request) -> Caller:
    return service_of(request).auth.caller(request)


Anyone = Annotated[RankService, Depends(_service)]
Who = Annotated[Caller, Depends(_caller)]


# Only described here; the receipt reads and checks it.
_KeyHeader = Annotated[
    str | None,
    Header(
        alias=IDEMPOTENCY_KEY,
        description="The same request with the same key has the first answer again, for 24 hours.",
        json_schema_extra={"pattern": "^[!-~]{1,255}$"},
    ),
]


async def receipt_of(
    request: Request, service: Anyone, caller: Who, _: _KeyHeader = None
) -> AsyncIterator[Receipt]:
    async with service.answers.receipt(request, caller) as receipt:
        yield receipt


# The receipt ends with the route's function, so that equal requests that wait go on then.
Once = Annotated[Receipt, Depends(receipt_of, scope="function")]
"""The receipt of every POST and DELETE of `/rl`; see `proxy_ext.idempotency`."""


def shaped(keep: KeepAnswer, shape: Callable[[Any], BaseModel]) -> KeepAnswer:
    """Store an answer in another shape; `no_receipt` stays itself, because commits check for it."""
    return keep if keep is no_receipt else lambda answer: keep(shape(answer))


_MAX_FIELDS = 2048  # fields of one query: more than the sessions that a lease may name
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")
"""Numbers in JSON's form; Python would accept `1_0`, too."""
_NOT_FINITE = re.compile(r"[+-]?(nan|inf(inity)?)", re.IGNORECASE)
_LAX: dict[str, TypeAdapter[Any]] = {
    "boolean": TypeAdapter(bool),
    "integer": TypeAdapter(int),
    "number": TypeAdapter(float),
}


class QueryFields:
    """The query fields of one route."""

    def __init__(self, dependant: Dependant) -> None:
        self.body = _kinds_by_field(dependant.body_params)
        """The kinds of JSON that each field of the body takes."""
        self.own = _kinds_by_field(dependant.query_params)
        """The same of the fields that the route itself reads in the query."""
        self._path = {field.alias for field in dependant.path_params}
        self.takes_session = "session_id" in {*self.body, *self.own, *self._path}
        """True if the route itself reads the query's session name."""

    async def parse(self, query: str, path: Mapping[str, Any]) -> dict[str, Any]:
        """Return the query's fields as a body has them; every route's may name its session.

        InvalidRequest for an unknown field, an empty one, one with two values, a number that is not
        finite, and for a key.
        """
        known = {"session_id": {"string"}, **self.body, **self.own}
        out = {}
        for name, texts in _by_name(query).items():
            if name == "api_key":
                # Refused at every route: URLs are written into logs.
                raise InvalidRequest(
                    "send api_key in the body of a POST, not in a URL", param="api_key"
                )
            if name in self._path:
                if set(texts) != {str(path[name])}:
                    raise differs(name, "path", "query")
            elif name in self.own and not any(texts):
                # The route reads it itself; clients send parameters without a value as empty.
                continue
            elif name in known:
                out[name] = await _value(name, texts, known[name])
            else:
                raise _unknown(name, {*known, *self._path})
        return out


def merge_fields(body: Any, fields: Mapping[str, Any]) -> Any:
    """Return a body with the query's fields; InvalidRequest where the two differ.

    A null field counts as missing. A body that is not an object stays as it is, to be refused.
    """
    if not isinstance(body, dict):
        return body
    out = dict(body)
    for name, value in fields.items():
        given = out.get(name)
        if given is None:
            out[name] = value
        elif isinstance(given, bool) is not isinstance(value, bool) or given != value:
            raise differs(name, "body", "query")
    return out


def differs(name: str, *places: str) -> InvalidRequest:
    """Return the error of a field that has two values."""
    code = "session_mismatch" if name == "session_id" else None
    message = f"{name} differs between {' and '.join(places)}; give it once"
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
        return parse_qs(query, keep_blank_values=True, max_num_fields=_MAX_FIELDS)
    except ValueError:
        raise InvalidRequest(f"the query has more than {_MAX_FIELDS} fields") from None


async def _value(name: str, texts: Sequence[str], kinds: set[str]) -> Any:
    """Parse the texts of a field that takes these kinds of JSON."""
    if "" in texts:
        raise InvalidRequest(f"{name} in the query is empty: leave it out", param=name)
    first = texts[0].lstrip()
    if "array" in kinds and not (len(texts) == 1 and first.startswith("[")):
        return list(texts)
    values = [await _one(name, text, kinds) for text in texts]
    if any(value != values[0] for value in values):
        raise InvalidRequest(f"{name} is in the query with different values", param=name)
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
            # The body's own checks report what is wrong with a text.
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


def _kinds_by_field(params: Iterable[Any]) -> dict[str, set[str]]:
    """Return the kinds of JSON that each field of these models takes, by their schemas."""
    out: dict[str, set[str]] = {}
    for param in params:
        model = param.field_info.annotation
        if isinstance(model, type) and issubclass(model, BaseModel):
            schema = model.model_json_schema()
            parts = schema.get("$defs", {})
            out |= {name: set(_kinds(one, parts)) for name, one in schema["properties"].items()}
    return out


def _kinds(schema: Mapping[str, Any], parts: Mapping[str, Any]) -> Iterator[str]:
    if "$ref" in schema:
        schema = parts[schema["$ref"].rpartition("/")[2]]
    if "type" in schema:
        yield schema["type"]
    for each in schema.get("anyOf", ()):
        yield from _kinds(each, parts)


class _StrictRequest(Request):
    async def json(self) -> Any:
        await read_json(self)
        # orjson makes floats of integers beyond 64 bits, which no store and no message can hold.
        return json.loads(await self.body(), parse_int=_integer)

    async def add_to_body(self, fields: dict[str, Any]) -> None:
        """Move the query's fields into the body, for all later readers of either."""
        body = merge_fields(await self.json() if await self.body() else {}, fields)
        self._body = json.dumps(body).encode()
        # Changed in the scope itself: equal requests must look equal, wherever their fields were.
        self.scope["query_string"] = b""

    def remove_from_query(self, name: str, query: str) -> None:
        """Remove a field from the query of a route that does not have the field."""
        rest = _by_name(query)
        del rest[name]
        self.scope["query_string"] = urlencode(rest, doseq=True).encode()


def _integer(digits: str) -> int:
    # Longer ones are not parsed, because that takes time.
    if len(digits) > 20 or not -(2**63) <= (number := int(digits)) < 2**63:
        raise InvalidRequest(
            "the body has an integer of more than 64 bits; write it as text",
            code="integer_too_large",
        )
    return number


class StrictRoute(APIRoute):
    """A route with a body of standard JSON, and a query that may have the body's fields.

    InvalidRequest for anything else.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        fields = QueryFields(self.dependant)

        async def strict(request: Request) -> Response:
            request = _StrictRequest(request.scope, request.receive)
            if query := request.scope["query_string"].decode("latin-1"):
                values = await fields.parse(query, request.path_params)
                if not fields.takes_session and "session_id" in values:
                    auth = service_of(request).auth
                    await auth.require_same(request, values.pop("session_id"))
                    if fields.own:
                        request.remove_from_query("session_id", query)
                if fields.body:
                    await request.add_to_body(values)
            return await handle(request)

        return strict
