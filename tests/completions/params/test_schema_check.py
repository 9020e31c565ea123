"""Values and their schemas, in words."""

from __future__ import annotations

from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from any_agent.completions.apis import all_apis
from any_agent.completions.params.schema_check import check, json_text, shown
from any_agent.completions.params.table import PARAMETERS, request_schema
from any_agent.errors import InvalidRequest
from tests.support.errors import fails_with

ROWS = [p for p in PARAMETERS if p.checked or p.kind == "refused"]
VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**65), 2**65)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | st.sampled_from(["auto", "none", "low", [], {}, ["text"], 0, 1, 2.0])
    | st.lists(st.integers(-1, 5) | st.text(max_size=3), max_size=18)
    | st.dictionaries(st.text(max_size=3), st.integers(), max_size=2)
)


@settings(max_examples=500, deadline=None)
@given(row=st.sampled_from(ROWS), value=VALUES)
def test_a_value_fits_if_json_schema_says_so(row: Any, value: Any) -> None:
    try:
        check(value, row.schema, row.name)
        fits = True
    except InvalidRequest as error:
        fits = False
        assert error.param == row.name
    if isinstance(value, float) and value.is_integer() and "integer" in str(row.schema):
        # JSON schema takes 2.0 for an integer. We do not.
        return
    if row.name == "messages" or row.schema.get("items", {}).get("type") in ("object", "array"):
        # What is in it is checked where it is read.
        return
    assert fits == jsonschema.Draft202012Validator(row.schema).is_valid(value)


def test_a_value_is_shown_short_in_an_error() -> None:
    for value, text in (
        ("a\nb", '"a\\nb"'),
        ("x" * 1000, '"' + "x" * 60 + '"'),
        ("\ud800", '"\\ud800"'),
        (10**5000, "a huge integer"),
        ({"a": 1}, "an object"),
        ([[]], "a list"),
    ):
        assert shown(value) == text
    with fails_with(InvalidRequest, "at least 1", param="x"):
        check(0, {"type": "integer", "minimum": 1}, "x")


def test_json_is_bounded_and_valid_unicode() -> None:
    assert json_text({"a": [1]}, "x", longest=9) == '{"a":[1]}'
    with fails_with(InvalidRequest, "9 bytes", "more than 8"):
        json_text({"a": [1]}, "x", longest=8)
    for value in ({"a": "\ud800"}, {"a": 2**70}, {1: 2}):
        with fails_with(InvalidRequest, "Unicode", param="x"):
            json_text(value, "x", longest=100)


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_the_schemas_of_bodies_are_schemas(api: Any) -> None:
    (found,) = (each for each in all_apis() if each.name == api)
    schema = request_schema(found.parameters(), found.required)
    jsonschema.Draft202012Validator.check_schema(schema)
    least = {"messages": [{}]} if api == "chat" else {"prompt": "x"}
    jsonschema.validate({**least, "temperature": None, "user": ""}, schema)
    jsonschema.validate({**least, "unknown": 1}, schema)
    for wrong in ({}, {**least, "n": 0}, dict.fromkeys(least)):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
