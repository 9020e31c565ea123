"""Formats of texts that no grammar knows: annotations, unless the schema is strict."""

from __future__ import annotations

import json
from typing import Any

import pytest

from any_agent.errors import UnsupportedParameter
from tests.support.completions.params import parse
from tests.support.errors import fails_with

SCHEMA: dict[str, Any] = {
    "properties": {
        "format": {"type": "string", "format": "path"},
        "a": {"anyOf": [{"format": "password"}, {"format": "email"}, {"const": {"format": "x"}}]},
    },
    "$defs": {"format": {"type": "integer", "format": "int32"}},
}
PLAIN: dict[str, Any] = {
    "properties": {
        "format": {"type": "string"},
        "a": {"anyOf": [{}, {"format": "email"}, {"const": {"format": "x"}}]},
    },
    "$defs": {"format": {"type": "integer"}},
}


def asked(api: str, schema: Any, strict: Any) -> dict[str, Any]:
    named = {"name": "x", "strict": strict, "schema": schema}
    if api == "responses":
        return {"text": {"format": {"type": "json_schema", **named}}}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("strict", [False, None])
def test_an_unknown_format_is_an_annotation(api: str, strict: Any) -> None:
    before = json.dumps(SCHEMA)
    grammar = parse(api=api, **asked(api, SCHEMA, strict)).gconfig.grammar
    assert grammar is not None
    assert json.loads(grammar) == {"json_schema": PLAIN}
    assert json.dumps(SCHEMA) == before


@pytest.mark.parametrize(
    ("api", "param"), [("chat", "response_format"), ("responses", "text.format")]
)
def test_a_strict_schema_has_known_formats(api: str, param: str) -> None:
    assert parse(api=api, **asked(api, PLAIN, True)).gconfig.grammar is not None
    with fails_with(UnsupportedParameter, param=param, code="unsupported_parameter"):
        parse(api=api, **asked(api, SCHEMA, True))
