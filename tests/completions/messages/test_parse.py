"""Anthropic's requests as calls: what becomes of each part, and what is refused by which name."""

from __future__ import annotations

from typing import Any

import pytest

from any_agent.completions.messages.input_messages import Definitions, conversation_of
from any_agent.completions.messages.parse import parse_count
from any_agent.completions.params.call import ParseSettings
from any_agent.errors import InvalidRequest, UnsupportedParameter
from any_agent.protocol.error_bodies import anthropic_body
from any_agent.types import GenerationHyperparameters, SessionMode
from tests.support.completions.messages import HELLO, parse
from tests.support.errors import fails_with

NO_TOOLS = Definitions({})
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"name": "find", "description": "Finds.", "input_schema": SCHEMA}
CHAT_TOOL = {
    "type": "function",
    "function": {"name": "find", "description": "Finds.", "parameters": SCHEMA},
}
FORMAT = {"type": "json_schema", "schema": SCHEMA}
USE = {"type": "tool_use", "id": "toolu_" + "0a" * 12, "name": "find", "input": {"a": 1}}
CALL = {
    "id": "call_" + "0a" * 12,
    "type": "function",
    "function": {"name": "find", "arguments": {"a": 1}},
}


def text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def test_an_sdk_that_asks_for_a_thread_is_told_to_do_without() -> None:
    with pytest.raises(UnsupportedParameter) as refused:
        parse(thread={})
    assert anthropic_body(refused.value)["error"]["details"] == {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
        "param": "thread",
    }


def test_blocks_become_chat_messages_in_their_order() -> None:
    messages = conversation_of(
        [text("Be "), {**text("brief."), "cache_control": {"type": "ephemeral"}}],
        [
            {"role": "user", "content": "Find it."},
            assistant({"type": "thinking", "thinking": "Hm.", "signature": "x"}, text("I look.")),
            # Some clients send each block as a message of its own.
            assistant({"type": "redacted_thinking", "data": "x"}, USE),
            user(text("And "), {"type": "tool_result", "tool_use_id": USE["id"]}, text("now?")),
            {"role": "system", "content": [text("Time is up.")]},
            user(),
        ],
        NO_TOOLS,
    )
    assert messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Find it."},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [CALL],
        },
        {"role": "tool", "tool_call_id": CALL["id"], "content": ""},
        {"role": "user", "content": "And now?"},
        {"role": "system", "content": "Time is up."},
        {"role": "user", "content": ""},
    ]


def test_thousands_of_pieces_are_one_turn() -> None:
    pieces = [assistant(text("ab"), USE)] * 5_000
    _, said, _ = conversation_of(None, [*HELLO, *pieces, *HELLO], NO_TOOLS)
    assert said["content"] == "ab" * 5_000
    assert len(said["tool_calls"]) == 5_000


def test_a_tool_that_failed_says_so() -> None:
    for content, becomes in (
        (None, "Error"),
        ("gone", "Error: gone"),
        ([text("no such file "), text("error")], "no such file error"),
    ):
        result = {"type": "tool_result", "tool_use_id": "x", "content": content, "is_error": True}
        (said,) = conversation_of(None, [user(result)], NO_TOOLS)
        assert said == {"role": "tool", "tool_call_id": "x", "content": becomes}


def test_the_billing_line_of_a_system_prompt_is_left_out() -> None:
    for system in ("x-anthropic-billing-header: a=1;\nBe brief.", "Be brief."):
        said, *_ = conversation_of(system, HELLO, NO_TOOLS)
        assert said == {"role": "system", "content": "Be brief."}
    assert conversation_of("x-anthropic-billing-header: a=1;", HELLO, NO_TOOLS) == HELLO
    assert conversation_of([], HELLO, NO_TOOLS) == HELLO


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}


def failed(**fields: Any) -> dict[str, Any]:
    return user({"type": "tool_result", "tool_use_id": "x", **fields})


WRONG: dict[str, list[dict[str, Any]]] = {
    "": [assistant(text("The answer is ("))],
    "[0].role": [{"role": role, "content": "a"} for role in ("robot", ["user"])],
    "[0].content": [{"role": "user"}, {"role": "assistant", "content": 5}],
    "[0].content[0]": [
        *(user(block) for block in (IMAGE, {"type": "document"}, {"type": "server_tool_use"})),
        *(user(USE), user("a"), {"role": "system", "content": [IMAGE]}),
        assistant({"type": ["text"]}),
    ],
    "[0].content[1]": [user(text("a"), {"type": "text"})],
    "[0].content[0].content[1]": [failed(content=[text("a"), IMAGE])],
    "[0].content[0].tool_use_id": [user({"type": "tool_result"})],
    "[0].content[0].is_error": [failed(is_error=1)],
    "[0].content[0].input": [assistant({**USE, "input": "{}"})],
    "[0].content[0].id": [assistant({**USE, "id": ""})],
    "[0].content[0].name": [assistant({**USE, "name": None})],
}


def test_tools_and_their_choice_become_those_of_chat() -> None:
    told = parse(tools=[{**TOOL, "type": "custom", "strict": True, "eager_input_streaming": True}])
    assert (told.chat.tools, told.chat.forced_call) == ([CHAT_TOOL], None)
    # No grammar enforces it, so the answer's header names it.
    assert told.chat.ignored == ("tools.strict",)
    assert parse(tools=[{**TOOL, "strict": False}]).chat.ignored == ()
    assert parse(tools=[{**TOOL, "strict": True}], tool_choice={"type": "none"}).chat.ignored == ()
    assert told.chat.parallel_tool_calls
    cases: list[tuple[dict[str, Any], Any, str | None, bool]] = [
        ({"type": "auto", "disable_parallel_tool_use": True}, [CHAT_TOOL], None, False),
        ({"type": "any"}, [CHAT_TOOL], "", True),
        ({"type": "tool", "name": "find"}, [CHAT_TOOL], "find", True),
        ({"type": "none"}, None, None, True),
    ]
    for choice, tools, forced, parallel in cases:
        chat = parse(tools=[TOOL], tool_choice=choice).chat
        if forced == "":
            # One tool, and one must be called.
            assert chat.forced_call in ("", "find")
        else:
            assert chat.forced_call == forced
        assert (chat.tools, chat.parallel_tool_calls) == (tools, parallel)
        assert chat.untrainable is None


BAD: dict[str, list[dict[str, Any]]] = {
    "tools": [
        *({"tools": tools} for tools in ({}, [5], [{"input_schema": {}}])),
        *(
            {"tools": [{**TOOL, name: value}]}
            for name, value in (("name", "a\n"), ("description", 5))
        ),
        {"tools": [{**TOOL, "input_schema": "x"}]},
        {"tools": [{**TOOL, "allowed_callers": ["code"]}]},
    ],
    "tool_choice": [
        *({"tool_choice": choice} for choice in ("any", {"type": "tool"})),
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}},
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}},
    ],
    "thinking": [
        *(
            {"thinking": value}
            for value in ("enabled", {}, {"type": "loud"}, {"type": ["enabled"]})
        ),
        *({"thinking": {"type": "enabled", "budget_tokens": most}} for most in (0, True)),
        {"thinking": {"type": "enabled", "display": 1}},
    ],
    "output_config": [{"output_config": value} for value in (5, {"volume": 1})],
    "output_config.effort": [{"output_config": {"effort": "huge"}}],
    "output_config.format": [{"output_config": {"format": {"type": "text"}}}],
    "output_format": [
        {"output_format": {"type": "json_schema"}},
        {"output_config": {"format": FORMAT}, "output_format": FORMAT},
    ],
    "max_tokens": [{"max_tokens": value} for value in (None, True)],
    "stop_sequences": [{"stop_sequences": [""]}],
    "mcp_servers": [{"mcp_servers": [{}]}],
    "container": [{"container": "x"}],
}


def test_wrong_messages_are_refused_by_their_place_and_parameters_by_name() -> None:
    conversations = {f"messages{at}": [{"messages": [m]} for m in ms] for at, ms in WRONG.items()}
    for param, cases in (conversations | BAD).items():
        for fields in cases:
            with fails_with(InvalidRequest, param=param):
                parse(**fields)


def test_thinking_becomes_the_templates_setting_or_an_effort() -> None:
    """An effort alone tells a template without a switch not to think."""
    off, on = {"type": "disabled"}, {"type": "enabled", "budget_tokens": 2048}
    most = {"output_config": {"effort": "max"}}
    none: frozenset[str] = frozenset()
    cases: list[tuple[dict[str, Any], dict[str, Any], str | None, bool]] = [
        ({}, {}, None, False),
        ({"thinking": on}, {"enable_thinking": True}, None, False),
        ({"thinking": off}, {"enable_thinking": False}, None, False),
        ({"thinking": off, **most}, {"enable_thinking": False}, None, False),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, {}, None, True),
        (most, {}, "max", False),
        ({"known": none, "thinking": off}, {}, "none", False),
        ({"known": none, "thinking": on}, {}, None, False),
    ]
    for fields, template, effort, hidden in cases:
        call = parse(**fields)
        assert call.chat.template_kwargs == template
        assert (call.chat.reasoning_effort, call.hides_thinking) == (effort, hidden)


def test_a_count_need_not_say_how_much() -> None:
    told = ParseSettings(SessionMode.EVAL, GenerationHyperparameters(), "policy")
    assert parse_count({"messages": HELLO}, told).chat.messages == HELLO
