"""Keywords and formats of schemas that no grammar enforces."""

from __future__ import annotations

import json
from typing import Any

import pytest

from any_agent.completions.structured_output import require_enforced
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


@pytest.mark.parametrize(
    ("api", "param"), [("chat", "response_format"), ("responses", "text.format")]
)
def test_an_unknown_format_is_an_annotation_unless_the_schema_is_strict(
    api: str, param: str
) -> None:
    before = json.dumps(SCHEMA)
    for strict in (False, None):
        grammar = parse(api=api, **asked(api, SCHEMA, strict)).gconfig.grammar
        assert grammar is not None and json.loads(grammar) == {"json_schema": PLAIN}
    assert json.dumps(SCHEMA) == before
    assert parse(api=api, **asked(api, PLAIN, True)).gconfig.grammar is not None
    with fails_with(UnsupportedParameter, param=param, code="unsupported_parameter"):
        parse(api=api, **asked(api, SCHEMA, True))


def test_keywords_that_a_grammar_enforces_pass() -> None:
    for schema in (
        None,
        True,
        {"type": "string", "format": "uuid"},
        {"properties": {"if": {"type": "integer", "minimum": 1}, "not": {"const": 1}}},
        {"enum": [{"not": 1}], "$defs": {"then": {"pattern": "a+"}}, "default": {"if": 1}},
    ):
        require_enforced(schema, "response_format")


def test_keywords_that_no_grammar_enforces_are_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"uniqueItems": True}, "uniqueItems"),
        ({"properties": {"a": {"multipleOf": 2}}}, "multipleOf"),
        ({"anyOf": [{"$defs": {"a": {"not": {}}}}]}, "not"),
        ({"items": {"type": "string", "format": "regex"}}, "format"),
        ({"format": []}, "format"),
        ({"pattern": "a", "maxLength": 3}, "lengths"),
    ]
    for schema, names in cases:
        with fails_with(UnsupportedParameter, names, param="text.format"):
            require_enforced(schema, "text.format")
