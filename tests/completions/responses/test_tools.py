"""The tools of a Responses call: groups of them, those that only OpenAI runs, and the choice."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.responses import Tool as OpenAITool
from pydantic import TypeAdapter

from any_agent.completions.responses.parse import ResponsesCall
from any_agent.completions.responses.tools import flat_tools, names_of, own_call
from any_agent.errors import InvalidRequest, UnsupportedParameter
from tests.support.completions.responses import parse
from tests.support.errors import fails_with

FIND = {"type": "function", "name": "find", "parameters": {"type": "object"}}
READ = {"type": "function", "name": "read", "description": "Reads.", "strict": False}
GROUP = {"type": "namespace", "name": "mcp__files", "description": "Files.", "tools": [FIND, READ]}
OTHER = {"type": "namespace", "name": "web", "tools": [FIND]}
GRAMMAR = 'start: "*** Begin Patch"'
PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "Patches.",
    "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR},
}


def shown(call: ResponsesCall) -> list[str]:
    """The names that the model sees."""
    return [tool["function"]["name"] for tool in call.chat.tools or ()]


def test_strict_functions_are_named_as_not_enforced() -> None:
    strict = {**FIND, "strict": True}
    assert parse(tools=[strict]).chat.ignored == ("tools.strict",)
    assert parse(tools=[{**GROUP, "tools": [READ, strict]}]).chat.ignored == ("tools.strict",)
    assert parse(tools=[strict], tool_choice="required").chat.ignored == ("tools.strict",)
    for unasked in ({"tools": [FIND, READ]}, {"tools": [strict], "tool_choice": "none"}):
        assert parse(**unasked).chat.ignored == ()


def test_a_groups_functions_are_shown_under_full_names() -> None:
    call = parse(tools=[READ, GROUP, OTHER])
    assert shown(call) == ["read", "mcp__files__find", "mcp__files__read", "web__find"]
    assert call.names == {
        "mcp__files__find": ("mcp__files", "find"),
        "mcp__files__read": ("mcp__files", "read"),
        "web__find": ("web", "find"),
    }
    called = {"id": "c", "type": "function", "function": {"name": "web__find", "arguments": "{}"}}
    assert own_call(called, call.names) == {
        **called,
        "namespace": "web",
        "function": {"name": "find", "arguments": "{}"},
    }
    plain = {**called, "function": {"name": "read", "arguments": "{}"}}
    assert own_call(plain, call.names) == plain


def test_an_answer_repeats_groups_and_its_record_does_not_hold_their_tools_twice() -> None:
    call = parse(tools=[READ, GROUP, OTHER])
    kinds = [(tool["type"], tool["name"]) for tool in call.repeated["tools"]]
    assert kinds == [("function", "read"), ("namespace", "mcp__files"), ("namespace", "web")]
    assert [each["name"] for each in call.repeated["tools"][1]["tools"]] == ["find", "read"]
    kept = call.chat.kept["responses"]
    assert "tools" not in kept
    assert kept["namespaces"] == [["mcp__files", "Files.", 1, 2], ["web", "", 3, 1]]
    assert flat_tools(call.chat.tools, kept["namespaces"], {}) == call.repeated["tools"]
    assert names_of(call.chat.tools, kept["namespaces"]) == call.names


def test_a_groups_call_comes_back_as_the_one_that_the_model_made() -> None:
    item = {"type": "function_call", "call_id": "c", "name": "find", "namespace": "web"}
    call = parse(
        [
            {**item, "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": ""},
        ],
        tools=[OTHER],
    )
    (made,) = call.chat.messages[0]["tool_calls"]
    assert made["function"]["name"] == "web__find"


def test_tools_in_the_input_are_shown_with_the_others() -> None:
    item = {"type": "additional_tools", "role": "developer", "tools": [OTHER, READ]}
    call = parse([{"role": "user", "content": "hi"}, item], tools=[READ])
    assert shown(call) == ["read", "web__find"]
    assert len(call.chat.messages) == 1
    assert [tool["name"] for tool in call.repeated["tools"]] == ["read"]
    with fails_with(InvalidRequest, param="tools"):
        parse([item, {"role": "user", "content": "hi"}], tools=[{**READ, "description": "Else."}])


def test_what_only_openai_runs_is_left_out_and_named() -> None:
    for kind in ("web_search", "web_search_preview_2025_03_11", "code_interpreter", "mcp"):
        tool = {"type": kind, "server_label": "x"}
        call = parse(tools=[tool, READ, {**OTHER, "tools": [FIND, tool]}])
        assert shown(call) == ["read", "web__find"]
        assert call.chat.ignored == (f"tools.{kind}",)
        assert call.chat.recorded[f"tools.{kind}"] == [tool, tool]
        assert parse(tools=[tool]).chat.tools is None
        with fails_with(UnsupportedParameter, param="tools"):
            parse(refuses=True, tools=[tool])
    # A key of such a tool is not recorded.
    call = parse(tools=[{"type": "mcp", "authorization": "sk-1"}])
    assert call.chat.ignored == ("tools.mcp",) and not call.chat.recorded


def test_a_function_that_waits_to_be_searched_for_is_shown_at_once() -> None:
    call = parse(tools=[{**READ, "defer_loading": True}])
    assert shown(call) == ["read"] and call.chat.ignored == ("tools.defer_loading",)
    with pytest.raises(UnsupportedParameter):
        parse(refuses=True, tools=[{**READ, "defer_loading": True}])


def test_a_function_of_a_group_may_be_chosen() -> None:
    choice = {"type": "function", "name": "find", "namespace": "web"}
    call = parse(tools=[GROUP, OTHER], tool_choice=choice)
    assert call.chat.forced_call == "web__find" and call.repeated["tool_choice"] == choice
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [choice]}
    call = parse(tools=[GROUP, OTHER], tool_choice=allowed)
    assert shown(call) == ["web__find"] and call.repeated["tool_choice"] == allowed
    kept = call.chat.kept["responses"]
    assert kept["namespaces"] == [["web", "", 0, 1]] and len(kept["tools"]) == 2


def test_a_wrong_group_or_tool_is_refused() -> None:
    wrongs: list[list[Any]] = [
        [{"type": "namespace"}],
        *([{**OTHER, "name": name}] for name in ("", 3, "x" * 256)),
        *([{**OTHER, "tools": tools}] for tools in ({}, [3], [{"type": "function"}])),
        [{**OTHER, "description": 3}],
        [OTHER, OTHER],
        [OTHER, {**FIND, "name": "web__find"}],
        [{**OTHER, "tools": [{**FIND, "name": f"f{k}"} for k in range(1025)]}],
    ]
    for tools in wrongs:
        with fails_with(InvalidRequest, param="tools"):
            parse(tools=tools)
    # What the agent would run in another way.
    for tool in (OTHER, {"type": "shell"}, {"type": "local_shell"}):
        with fails_with(UnsupportedParameter, param="tools"):
            parse(tools=[{**OTHER, "tools": [tool]}])


def test_a_custom_tool_is_shown_as_a_function_of_one_text() -> None:
    call = parse(tools=[READ, PATCH, {**OTHER, "tools": [FIND, {**PATCH, "format": None}]}])
    assert shown(call) == ["read", "patch", "web__find", "web__patch"]
    assert call.chat.custom == {"patch", "web__patch"}
    assert call.chat.ignored == ("tools.format",)
    assert call.chat.tools is not None
    _, patch, _, free = (tool["function"] for tool in call.chat.tools)
    assert patch["description"].startswith("Patches.\n\n") and GRAMMAR in patch["description"]
    assert free["description"] == "Patches."
    assert patch["parameters"]["required"] == ["input"] == list(patch["parameters"]["properties"])
    _, repeated, group = call.repeated["tools"]
    assert repeated == PATCH
    assert group["tools"][1] == {**PATCH, "format": {"type": "text"}}
    TypeAdapter(list[OpenAITool]).validate_python(call.repeated["tools"])
    kept = call.chat.kept["responses"]
    assert "tools" not in kept
    again = flat_tools(call.chat.tools, kept["namespaces"], kept["custom_formats"])
    assert again == call.repeated["tools"]


def test_a_custom_tool_may_stand_in_the_input_and_wait_to_be_searched_for() -> None:
    tools = [{**PATCH, "defer_loading": True}, {**OTHER, "tools": [PATCH]}]
    item = {"type": "additional_tools", "role": "developer", "tools": tools}
    call = parse([{"role": "user", "content": "hi"}, item], tools=[PATCH])
    assert shown(call) == ["patch", "web__patch"] and call.chat.custom == {*shown(call)}
    assert call.chat.ignored == ("tools.defer_loading", "tools.format")
    assert call.repeated["tools"] == [PATCH]


def test_a_custom_tool_may_be_chosen() -> None:
    choice = {"type": "custom", "name": "patch", "namespace": "web"}
    tools = [READ, {**OTHER, "tools": [FIND, PATCH]}]
    call = parse(tools=tools, tool_choice=choice)
    assert call.chat.forced_call == "web__patch" and call.repeated["tool_choice"] == choice
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [choice]}
    call = parse(tools=tools, tool_choice=allowed)
    assert (shown(call), call.chat.forced_call) == (["web__patch"], "web__patch")
    assert call.repeated["tool_choice"] == allowed
    unseen = parse(tools=[READ, PATCH], tool_choice={"type": "function", "name": "read"})
    assert unseen.chat.forced_call == "read"
    for wrong in (
        {"type": "custom", "name": "read"},
        {"type": "function", "name": "patch"},
        {"type": "custom"},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "read"}]},
    ):
        with fails_with(InvalidRequest, param="tool_choice"):
            parse(tools=[READ, PATCH], tool_choice=wrong)


def test_a_wrong_custom_tool_is_refused() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "x"}
    wrongs: list[dict[str, Any]] = [
        *({"name": name} for name in (3, None)),
        {"description": 3},
        *({"format": form} for form in ("lark", {"type": "json"}, {"type": "grammar"})),
        {"format": {**grammar, "syntax": "ebnf"}},
        {"format": {**grammar, "definition": 3}},
    ]
    for wrong in wrongs:
        for tools in ([{**PATCH, **wrong}], [{**OTHER, "tools": [{**PATCH, **wrong}]}]):
            with fails_with(InvalidRequest, param="tools"):
                parse(tools=tools)
    with fails_with(InvalidRequest, param="tools"):
        parse(tools=[{**PATCH, "name": ""}])


def test_which_reasoning_the_model_sees_is_the_templates_choice() -> None:
    call = parse(reasoning={"context": "all_turns"})
    assert call.chat.ignored == ("reasoning.context",)
    assert not parse(reasoning={"context": "auto"}).chat.ignored
    for wrong in (
        lambda: parse(refuses=True, reasoning={"context": "all_turns"}),
        lambda: parse(reasoning={"context": "none"}),
    ):
        with pytest.raises(UnsupportedParameter):
            wrong()
