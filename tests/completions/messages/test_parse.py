"""Anthropic's requests as calls: what becomes of each part, and what is refused by which name."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


@pytest.mark.parametrize(
    ("content", "becomes"),
    [
        (None, "Error"),
        ("gone", "Error: gone"),
        ([text("no such file "), text("error")], "no such file error"),
    ],
)
def test_a_tool_that_failed(content: Any, becomes: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "x", "content": content, "is_error": True}
    (said,) = conversation_of(None, [user(result)], NO_TOOLS)
    assert said == {"role": "tool", "tool_call_id": "x", "content": becomes}


@pytest.mark.parametrize("system", ["x-anthropic-billing-header: a=1;\nBe brief.", "Be brief."])
def test_the_billing_line_is_left_out(system: str) -> None:
    said, *_ = conversation_of(system, HELLO, NO_TOOLS)
    assert said == {"role": "system", "content": "Be brief."}
    assert conversation_of("x-anthropic-billing-header: a=1;", HELLO, NO_TOOLS) == HELLO
    assert conversation_of([], HELLO, NO_TOOLS) == HELLO


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
WRONG: list[tuple[dict[str, Any], str]] = [
    (user(IMAGE), "messages[0].content[0].image: this model reads text only"),
    (
        user({"type": "tool_result", "tool_use_id": "x", "content": [text("a"), IMAGE]}),
        "messages[0].content[0].tool_result.content[1].image: this model reads text only",
    ),
    (user({"type": "document"}), ".document: this model reads text only: put it into a text"),
    (user({"type": "server_tool_use"}), 'type "server_tool_use", which is not supported'),
    (user(text("a"), {"type": "text"}), "messages[0].content[1] must be a"),
    (user({"type": "tool_result"}), "content[0].tool_use_id must be a non-empty string"),
    (user({"type": "tool_result", "tool_use_id": "x", "is_error": 1}), ".is_error must be"),
    (user(USE), "messages[0].content[0] must be a"),
    (user("a"), "messages[0].content[0] must be a"),
    ({"role": "user"}, "messages[0].content must be a string or a list"),
    ({"role": "robot", "content": "a"}, "messages[0].role must be user, assistant or system"),
    ({"role": ["user"], "content": "a"}, "messages[0].role must be user, assistant or system"),
    ({"role": "system", "content": [IMAGE]}, "messages[0].content[0].image"),
    ({"role": "assistant", "content": 5}, "messages[0].content must be a string or a list"),
    (assistant({**USE, "input": "{}"}), "messages[0].content[0].input must be an object"),
    (assistant({**USE, "id": ""}), "messages[0].content[0].id must be a non-empty string"),
    (assistant({**USE, "name": None}), "messages[0].content[0].name must be a non-empty"),
    (assistant({"type": ["text"]}), "messages[0].content[0] must be a"),
    (assistant(text("The answer is (")), "not prefilled"),
]


@pytest.mark.parametrize(("message", "says"), WRONG, ids=[each[1] for each in WRONG])
def test_what_is_no_conversation(message: dict[str, Any], says: str) -> None:
    with fails_with(InvalidRequest, says) as raised:
        parse(messages=[message])
    assert raised.value.param is not None and raised.value.param.startswith("messages")
    # It is a path in the body, which has no such key.
    assert "tool_result" not in raised.value.param


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


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": {}}, "tools must be a list"),
    ({"tools": [5]}, "tools[0] must be an object"),
    ({"tools": [{"input_schema": {}}]}, "tools[0].name must be"),
    ({"tools": [{**TOOL, "name": "a\n"}]}, "tools[0].name must be"),
    ({"tools": [{**TOOL, "description": 5}]}, "tools[0].description must be a string"),
    ({"tools": [{**TOOL, "input_schema": "x"}]}, "tools[0].input_schema must be an object"),
    ({"tools": [{**TOOL, "allowed_callers": ["code"]}]}, "tools[0] may not be called directly"),
    ({"tool_choice": "any"}, "tool_choice must be"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice must be"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "not one of the tools"),
    (
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}},
        "disable_parallel_tool_use must be",
    ),
    ({"thinking": "enabled"}, "thinking must be an object"),
    ({"thinking": {}}, "thinking.type must be one of"),
    ({"thinking": {"type": "loud"}}, "thinking.type"),
    ({"thinking": {"type": ["enabled"]}}, "thinking.type must be one of"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens must be"),
    ({"thinking": {"type": "enabled", "budget_tokens": True}}, "thinking.budget_tokens must be"),
    ({"thinking": {"type": "enabled", "display": 1}}, "thinking.display must be"),
    ({"output_config": 5}, "output_config must be an object"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort"),
    ({"output_config": {"volume": 1}}, "output_config.'volume' is not supported"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format must be of type"),
    ({"output_format": {"type": "json_schema"}}, "the schema of output_format must be an object"),
    ({"output_config": {"format": FORMAT}, "output_format": FORMAT}, "contradict each other"),
    ({"max_tokens": None}, "max_tokens is required"),
    ({"max_tokens": True}, "max_tokens must be"),
    ({"stream": "yes"}, "stream must be"),
    ({"temperature": 3}, "temperature must be"),
    ({"top_p": 0}, "top_p must be"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"n": 2}, "unknown parameter"),
    ({"logprobs": True}, "unknown parameter"),
    ({"container": "x"}, "container"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
]


@pytest.mark.parametrize(("fields", "says"), BAD, ids=[each[1] for each in BAD])
def test_what_is_refused(fields: dict[str, Any], says: str) -> None:
    with fails_with(InvalidRequest, says) as raised:
        parse(**fields)
    assert raised.value.param is not None


def test_what_has_no_effect_is_recorded() -> None:
    fields: dict[str, Any] = {
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "cache_control": {"type": "ephemeral"},
        "context_management": {"edits": []},
    }
    recorded = parse(**fields).chat.recorded
    assert recorded["metadata"] == {"user_id": "u"} and recorded["service_tier"] == "auto"


@pytest.mark.parametrize(
    ("fields", "template", "effort", "hidden"),
    [
        ({}, {}, None, False),
        ({"thinking": {"type": "enabled"}}, {"enable_thinking": True}, None, False),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}, None, False),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, {}, None, True),
        ({"output_config": {"effort": "max"}}, {}, "max", False),
        (
            {"thinking": {"type": "disabled"}, "output_config": {"effort": "max"}},
            {"enable_thinking": False},
            None,
            False,
        ),
    ],
)
def test_thinking_becomes_the_templates_setting(
    fields: dict[str, Any], template: dict[str, Any], effort: str | None, hidden: bool
) -> None:
    call = parse(**fields)
    assert call.chat.template_kwargs == template
    assert (call.chat.reasoning_effort, call.hides_thinking) == (effort, hidden)


def test_a_template_without_a_switch_gets_an_effort_only() -> None:
    chat = parse(known=frozenset(), thinking={"type": "disabled"}).chat
    assert (chat.template_kwargs, chat.reasoning_effort) == ({}, "none")
    chat = parse(known=frozenset(), thinking={"type": "enabled", "budget_tokens": 2048}).chat
    assert (chat.template_kwargs, chat.reasoning_effort) == ({}, None)


def test_a_given_format_becomes_a_grammar_which_trains_nothing() -> None:
    for fields in ({"output_config": {"format": FORMAT}}, {"output_format": FORMAT}):
        chat = parse(**fields).chat
        assert orjson.loads(chat.gconfig.grammar or "") == {"json_schema": SCHEMA}
        assert chat.untrainable == "grammar"


def test_in_train_sessions_the_runs_sampling_holds() -> None:
    chat = parse("train", temperature=0, top_p=0.5, top_k=3, max_tokens=1_000_000).chat
    assert (chat.gconfig.temperature, chat.gconfig.top_p) == (1.0, 1.0)
    assert chat.gconfig.max_new_tokens == 100
    assert {"temperature", "top_p", "top_k", "max_tokens"} <= chat.overrides.keys()
    assert chat.id_prefix == "msg_"


def test_a_count_need_not_say_how_much() -> None:
    told = ParseSettings(SessionMode.EVAL, GenerationHyperparameters(), "policy")
    assert parse_count({"messages": HELLO}, told).chat.messages == HELLO


NAMES = [
    *("system", "messages", "tools", "tool_choice", "thinking", "output_config", "output_format"),
    *("stop_sequences", "metadata", "context_management", "max_tokens", "role", "content", "type"),
    *("text", "tool_use", "tool_result", "input", "id", "name", "input_schema", "tool_use_id"),
    *("user", "assistant", "enabled", "image", "effort", "format", "json_schema", "schema"),
]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | st.sampled_from(NAMES),
    lambda below: (
        st.lists(below, max_size=4)
        | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=3), below, max_size=5)
    ),
    max_leaves=12,
)


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES[:11]), VALUES, max_size=5), VALUES, st.booleans())
@pytest.mark.service
def test_whatever_comes_is_a_call_or_refused(
    fields: dict[str, Any], block: Any, is_user: bool
) -> None:
    message = {"role": "user" if is_user else "assistant", "content": [block]}
    for body in (fields, {"messages": [message, *HELLO]}, {"tools": [block]}):
        try:
            parse(**body)
        except InvalidRequest as error:
            assert error.status == 400 and error.message
