"""`functions` and `function_call`: parsed as tools, and told in their own form."""

from __future__ import annotations

from typing import Any

import pytest

from any_agent.completions.params.tools import with_tool_calls
from any_agent.errors import InvalidRequest, UnsupportedParameter
from tests.support.completions.params import OTHER, TOOL, parse
from tests.support.errors import fails_with

FUNCTIONS = [TOOL["function"], OTHER["function"]]


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ({}, {}),
        ({"function_call": "auto"}, {"tool_choice": "auto"}),
        ({"function_call": "none"}, {"tool_choice": "none"}),
        (
            {"function_call": {"name": "g"}},
            {"tool_choice": {"type": "function", "function": {"name": "g"}}},
        ),
    ],
)
def test_they_are_tools(older: dict[str, Any], newer: dict[str, Any]) -> None:
    one = parse(functions=FUNCTIONS, **older)
    other = parse(tools=[TOOL, OTHER], **newer)
    assert (one.tools, one.forced_call, one.untrainable) == (
        (other.tools, other.forced_call, other.untrainable)
    )
    assert (one.legacy_functions, other.legacy_functions) == (True, False)


@pytest.mark.parametrize("nothing", [{"functions": []}, {"function_call": "none"}])
def test_empty_functions_change_nothing(nothing: dict[str, Any]) -> None:
    assert parse(**nothing, tools=[TOOL]) == parse(tools=[TOOL])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"functions": FUNCTIONS, "tools": [TOOL]}, "tools and tool_choice"),
        ({"functions": FUNCTIONS, "tool_choice": "auto"}, "tool_choice"),
        ({"function_call": {"name": "f"}, "tools": [TOOL]}, "tools"),
        ({"functions": {}, "function_call": {"name": "f"}}, "functions"),
        ({"functions": "f"}, "functions"),
        ({"functions": ["f"]}, "functions[0]"),
        ({"functions": [{}]}, "functions[0]"),
        ({"functions": [{"name": ""}]}, "functions[0].name"),
        ({"functions": [FUNCTIONS[0]] * 2}, "functions[1]"),
        ({"functions": FUNCTIONS, "function_call": "f"}, "function_call"),
        ({"functions": FUNCTIONS, "function_call": {"name": "h"}}, "function_call"),
        ({"function_call": {"name": "f"}}, "function_call"),
    ],
)
def test_malformed_functions_are_refused_by_their_older_name(
    wrong: dict[str, Any], says: str
) -> None:
    with fails_with(InvalidRequest, says) as raised:
        parse(**wrong)
    assert not isinstance(raised.value, UnsupportedParameter)
    assert raised.value.param in ("functions", "function_call")


def test_the_older_form_becomes_calls_and_results_of_tools() -> None:
    told: list[Any] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "3"},
        {"role": "assistant", "content": "It is 3.", "function_call": None},
    ]
    asked, called, result, said = with_tool_calls(told)
    assert (asked, said) == (told[0], told[3])
    assert called == {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        ],
    }
    assert result == {"role": "tool", "name": "f", "content": "3", "tool_call_id": "call_1"}
    assert with_tool_calls(told[:1]) is not None and told[1]["function_call"]
    plain = told[:1]
    assert with_tool_calls(plain) is plain


@pytest.mark.parametrize(
    "call", [{"arguments": "{}"}, "f", 7, {"name": 5}, {"name": "f", "other": {}}]
)
def test_a_call_of_no_valid_form(call: Any) -> None:
    messages = [{"role": "assistant", "function_call": call}]
    if isinstance(call, dict) and call.get("name") == "f":
        assert with_tool_calls(messages)[0]["tool_calls"]
        return
    with fails_with(InvalidRequest, "messages[0].function_call"):
        with_tool_calls(messages)
    messages[0]["tool_calls"] = [{}]
    with fails_with(InvalidRequest, "function_call and tool_calls"):
        with_tool_calls(messages)
