"""Schemas beside tools: what would not be enforced is refused."""

from __future__ import annotations

from typing import Any

import pytest

from any_agent.completions.structured_output import require_enforced
from any_agent.errors import UnsupportedParameter
from tests.support.errors import fails_with


@pytest.mark.parametrize(
    "schema",
    [
        None,
        True,
        {"type": "string", "format": "uuid"},
        {"properties": {"if": {"type": "integer", "minimum": 1}, "not": {"const": 1}}},
        {"enum": [{"not": 1}], "$defs": {"then": {"pattern": "a+"}}, "default": {"if": 1}},
    ],
)
def test_what_is_enforced(schema: Any) -> None:
    require_enforced(schema, "response_format")


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"uniqueItems": True}, "uniqueItems"),
        ({"properties": {"a": {"multipleOf": 2}}}, "multipleOf"),
        ({"anyOf": [{"$defs": {"a": {"not": {}}}}]}, "not"),
        ({"items": {"type": "string", "format": "regex"}}, "format"),
        ({"format": []}, "format"),
        ({"pattern": "a", "maxLength": 3}, "lengths"),
    ],
)
def test_keywords_that_no_grammar_enforces_are_refused(schema: Any, says: str) -> None:
    with fails_with(UnsupportedParameter, says, param="text.format") as raised:
        require_enforced(schema, "text.format")
    assert raised.value.message.startswith("text.format together with tools cannot have")
