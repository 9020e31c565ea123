"""`functions` and `function_call`: parsed as tools, and told in their own form."""

from __future__ import annotations

from typing import Any

from any_agent.completions.params.tools import with_tool_calls
from any_agent.errors import InvalidRequest, UnsupportedParameter
from tests.support.completions.params import OTHER, TOOL, parse
from tests.support.errors import fails_with

FUNCTIONS = [TOOL["function"], OTHER["function"]]


def test_functions_are_parsed_as_tools() -> None:
    named = {"name": "g"}
    for older, newer in (
        ({}, {}),
        ({"function_call": "auto"}, {"tool_choice": "auto"}),
        ({"function_call": "none"}, {"tool_choice": "none"}),
        ({"function_call": named}, {"tool_choice": {"type": "function", "function": named}}),
    ):
        one = parse(functions=FUNCTIONS, **older)
        other = parse(tools=[TOOL, OTHER], **newer)
        assert (one.tools, one.forced_call, one.untrainable) == (
            (other.tools, other.forced_call, other.untrainable)
        )
        assert (one.legacy_functions, other.legacy_functions) == (True, False)
    for nothing in ({"functions": []}, {"function_call": "none"}):
        assert parse(**nothing, tools=[TOOL]) == parse(tools=[TOOL])


def test_malformed_functions_are_refused_by_their_older_name() -> None:
    wrongs: list[dict[str, Any]] = [
        {"functions": FUNCTIONS, "tools": [TOOL]},
        {"functions": FUNCTIONS, "tool_choice": "auto"},
        {"function_call": {"name": "f"}, "tools": [TOOL]},
        {"functions": {}, "function_call": {"name": "f"}},
        *({"functions": given} for given in ("f", ["f"], [{}], [{"name": ""}])),
        {"functions": [FUNCTIONS[0]] * 2},
        *({"functions": FUNCTIONS, "function_call": call} for call in ("f", {"name": "h"})),
        {"function_call": {"name": "f"}},
    ]
    for wrong in wrongs:
        with fails_with(InvalidRequest) as raised:
            parse(**wrong)
        assert not isinstance(raised.value, UnsupportedParameter)
        assert raised.value.param in ("functions", "function_call"), wrong


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
    plain = told[:1]
    assert with_tool_calls(plain) is plain


def test_a_call_of_no_valid_form_is_refused() -> None:
    for call in ({"arguments": "{}"}, "f", 7, {"name": 5}):
        messages: list[Any] = [{"role": "assistant", "function_call": call}]
        with fails_with(InvalidRequest, "messages[0].function_call"):
            with_tool_calls(messages)
        messages[0]["tool_calls"] = [{}]
        with fails_with(InvalidRequest, "function_call and tool_calls"):
            with_tool_calls(messages)
    odd = [{"role": "assistant", "function_call": {"name": "f", "other": {}}}]
    assert with_tool_calls(odd)[0]["tool_calls"]
