"""Schemas beside tools: what would not be enforced is refused."""

from __future__ import annotations

from typing import Any

from any_agent.completions.structured_output import require_enforced
from any_agent.errors import UnsupportedParameter
from tests.support.errors import fails_with


def test_what_a_grammar_enforces_passes() -> None:
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
