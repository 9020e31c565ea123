"""Answers in Anthropic's shape: a stream's are the whole one's, whatever the model wrote."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from any_agent.chat import chain_keys
from any_agent.chat.output.message import MessageBuilder, MessageDelta, ToolCallIds
from any_agent.completions.call_types import Delta
from any_agent.completions.messages.encoder import MessagesEncoder
from any_agent.completions.messages.input_messages import Definitions, conversation_of
from any_agent.errors import EngineUnavailable, SessionClosed
from any_agent.types import Interaction
from tests.support.completions.messages import (
    HELLO,
    accumulated,
    answer_of,
    interaction_of,
    whole_of,
)
from tests.support.laws.apis.given import events_of

ARGUMENTS = st.sampled_from(
    [
        *("", "{}", '{"a": 1', '{"a": 1}', "null", "[]", '{"INVALID_JSON": "x"}', '{"a":1,"a":2}'),
        *('{"n": 123456789012345678901234567890}', '{"x": 1.0}', '{"x": 1e400}', '"x"', "{'a': 1}"),
        *('{"s": "\\ud800"}', '{"s": "\u2028\\n é"}', '{"a": ' + "[" * 40 + "]" * 40 + "}", "NaN"),
    ]
) | st.dictionaries(
    st.text(max_size=3),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(), below, max_size=3),
        max_leaves=5,
    ),
    max_size=3,
).map(json.dumps)
STEPS = st.lists(
    st.tuples(st.just("call"), ARGUMENTS)
    | st.tuples(st.sampled_from(["content", "reasoning"]), st.text("ab \n\"'é", max_size=4)),
    max_size=7,
)


def built(steps: list[tuple[str, str]]) -> Interaction:
    """The record of an output."""
    builder = MessageBuilder(ToolCallIds([1]))
    for kind, text in steps:
        if kind == "call":
            builder.open_call("find")
            builder.arguments(text)
        else:
            getattr(builder, kind)(text)
    parsed = builder.message()
    order = {"order": [list(each) for each in parsed.order]} if parsed.order else {}
    finish = "tool_calls" if parsed.tool_calls else "stop"
    return interaction_of(parsed.to_message(), finish, **order)


def streamed(
    answer: MessagesEncoder, deltas: list[MessageDelta], interaction: Interaction
) -> bytes:
    out = [answer.start(0)]
    out += [answer.delta(Delta(delta, [], [])) for delta in deltas]
    return b"".join([*out, answer.end(0, interaction), answer.last([interaction])])


@settings(max_examples=100, deadline=None)
@given(STEPS)
def test_an_answer_that_is_sent_back_is_what_was_recorded(steps: list[tuple[str, str]]) -> None:
    interaction = built(steps)
    whole = whole_of(answer_of().whole([interaction]))
    content = json.loads(json.dumps([block.to_dict() for block in whole.content]))
    messages = [*HELLO, {"role": "assistant", "content": content}, *HELLO]
    said = conversation_of(None, messages, Definitions({}))[1]
    recorded = interaction.output_message
    assert chain_keys([said], None) == chain_keys([recorded], None)
    assert said.get("reasoning_content") == recorded.get("reasoning_content")
    assert [call["id"] for call in said.get("tool_calls", ())] == [
        call["id"] for call in recorded.get("tool_calls", ())
    ]


def test_an_answer_has_thinking_text_and_tool_use_blocks() -> None:
    call = {"id": "call_" + "a1" * 12, "type": "function"}
    function = {"name": "find", "arguments": '{"text": "x"}'}
    message = {
        "content": "Well.",
        "reasoning_content": "Hm.",
        "tool_calls": [{**call, "function": function}],
    }
    interaction = interaction_of(message, "tool_calls")
    answer = whole_of(answer_of(model="m").whole([interaction]))
    thinking, text, use = answer.content
    omitted = {"type": "adaptive", "display": "omitted"}
    without = whole_of(answer_of(thinking=omitted).whole([interaction]))
    hidden, *rest = without.content
    assert hidden.type == "thinking" and not hidden.thinking and hidden.signature
    assert rest == [text, use]
    opened = {"index": 0, **call, "function": {"name": "find", "arguments": ""}}
    told = {"index": 0, "function": {"arguments": function["arguments"]}}
    deltas = [MessageDelta(reasoning_content="Hm."), MessageDelta("Well.")]
    deltas += [MessageDelta(tool_calls=[each]) for each in (opened, told)]
    assert accumulated(streamed(answer_of(thinking=omitted), deltas, interaction)) == without
    assert (answer.id, answer.model, answer.role) == ("msg_1", "m", "assistant")
    assert thinking.type == "thinking" and thinking.thinking == "Hm." and thinking.signature
    assert text.type == "text" and text.text == "Well."
    assert use.type == "tool_use" and (use.id, use.name) == ("toolu_" + "a1" * 12, "find")
    assert use.input == {"text": "x"}
    assert (answer.stop_reason, answer.stop_sequence) == ("tool_use", None)
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (7, 3)


def test_why_it_ended_is_told_in_anthropics_words() -> None:
    for finish, matched, reason, sequence in (
        ("stop", None, "end_turn", None),
        ("stop", 1, "stop_sequence", "b"),
        ("length", None, "max_tokens", None),
        ("tool_calls", 0, "tool_use", None),
        ("abort", None, "max_tokens", None),
    ):
        request = {} if matched is None else {"matched_stop": matched}
        interaction = interaction_of({"content": "x"}, finish, **request)
        whole = whole_of(answer_of(stop_sequences=["a", "b"]).whole([interaction]))
        stream = streamed(answer_of(stop_sequences=["a", "b"]), [MessageDelta("x")], interaction)
        for got in (whole, accumulated(stream)):
            assert (got.stop_reason, got.stop_sequence) == (reason, sequence)


def test_an_answer_without_a_word_has_a_text_to_be_found() -> None:
    interaction = interaction_of({"content": ""})
    answer = whole_of(answer_of().whole([interaction]))
    assert accumulated(streamed(answer_of(), [], interaction)) == answer
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": ""}]


def test_text_leaves_as_it_comes_and_a_call_when_it_is_whole() -> None:
    answer = answer_of()
    answer.start(0)
    (start, delta) = events_of(answer.delta(Delta(MessageDelta("a"), [], [])))
    assert start[1]["content_block"] == {"type": "text", "text": ""}
    assert delta[1]["delta"] == {"type": "text_delta", "text": "a"}
    (delta,) = events_of(answer.delta(Delta(MessageDelta("b"), [], [])))
    assert delta[1]["delta"]["text"] == "b"
    first = {"index": 0, "id": "x", "type": "function"}
    step = {**first, "function": {"name": "find", "arguments": ""}}
    stop, start = events_of(answer.delta(Delta(MessageDelta(tool_calls=[step]), [], [])))
    assert (stop[0], start[1]["content_block"]["name"]) == ("content_block_stop", "find")
    step = {"index": 0, "function": {"arguments": '{"a": 1'}}
    assert answer.delta(Delta(MessageDelta(tool_calls=[step]), [], [])) == b""
    message = {"tool_calls": [{"id": "x", "function": {"name": "find", "arguments": '{"a": 1'}}]}
    delta, *_ = events_of(answer.end(0, interaction_of(message, "length")))
    written = json.loads(delta[1]["delta"]["partial_json"])
    assert written == {"INVALID_JSON": '{"a": 1'}


def test_what_breaks_a_stream_has_the_errors_shape() -> None:
    ((name, event),) = events_of(answer_of().failed(EngineUnavailable("it is gone")))
    assert (name, event["type"]) == ("error", "error")
    assert event["error"]["type"] == "overloaded_error"
    assert event["error"]["code"] == event["error"]["details"]["error_code"] == "engine_unavailable"
    error = SessionClosed("over", param="x", details={"state": "trained"})
    ((_, event),) = events_of(answer_of().failed(error))
    assert event["error"]["type"] == "invalid_request_error"
    assert event["error"]["details"] == {
        "error_code": "session_closed",
        "state": "trained",
        "param": "x",
    }
