"""A body to a call, and the events of its answer by the SDK's own models, strictly."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from any_agent.chat import MessageDelta
from any_agent.chat.output.markers import TokenSpans
from any_agent.completions.call_types import Delta, Head
from any_agent.completions.responses.encoder import ResponsesEncoder
from any_agent.errors import AnyAgentError, EngineUnavailable, InvalidRequest, UnsupportedParameter
from tests.completions.responses.test_input_items import CHAT_CALL, HEX, recorded
from tests.support.completions.responses import parse, valid_events, valid_response
from tests.support.errors import fails_with

LONG = "x" * 100_000
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}


def test_a_response_is_parsed_as_the_chat_call_that_it_means() -> None:
    call = parse(
        [{"role": "user", "content": "hi"}],
        instructions="Be brief.",
        tools=[TOOL],
        tool_choice={"type": "function", "name": "f"},
        max_output_tokens=7,
        reasoning={"effort": "low"},
        parallel_tool_calls=False,
        stream=True,
    )
    chat = call.chat
    assert [m["role"] for m in chat.messages] == ["system", "user"]
    assert chat.tools == [
        {"type": "function", "function": {k: v for k, v in TOOL.items() if k != "type"}}
    ]
    assert (chat.forced_call, chat.untrainable) == ("f", None)
    assert (chat.gconfig.max_new_tokens, chat.reasoning_effort) == (7, "low")
    assert chat.stream and not chat.parallel_tool_calls
    assert (chat.id_prefix, chat.prompt_parameter) == ("resp_", "input")
    assert call.repeated["tools"] == [{**TOOL, "description": None}]
    # Instructions are among the messages, tools beside them: they are not kept twice.
    assert chat.kept["responses"]["instructions"] == 1
    assert "tools" not in chat.kept["responses"]


@pytest.mark.parametrize(
    "name", ["reasoning", "text", "include", "stream_options", "tools", "tool_choice", "metadata"]
)
def test_odd_values_are_refused_or_taken(name: str) -> None:
    for value in (3, [], {}, {"x": 1}, "auto" * 200, None, True, [{"type": 3}], {"surprise": 1}):
        try:
            parse(**{name: value})
        except AnyAgentError as error:
            assert error.status == 400 and name in str(error.param), error
    wrong = {"type": "xml"}
    with fails_with(UnsupportedParameter, param="text.format"):
        parse(text={"format": wrong})


ENTRY = {"type": "function", "name": "f"}
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [ENTRY]}


def test_the_choice_of_tools_is_repeated() -> None:
    for choice in ("none", "required", ENTRY, ALLOWED):
        call = parse(tools=[TOOL, {**TOOL, "name": "g"}], tool_choice=choice)
        assert call.repeated["tool_choice"] == choice
        assert call.chat.kept["responses"]["tool_choice"] == choice
    # What the model is not shown is kept for it.
    call = parse(tools=[TOOL], tool_choice="none")
    assert call.chat.tools is None
    assert call.chat.kept["responses"]["tools"] == call.repeated["tools"]


def test_no_choice_of_tools_is_repeated_without_end() -> None:
    cases: list[tuple[Any, str]] = [
        ({**ENTRY, "junk": LONG}, "tool_choice.junk"),
        ({**ALLOWED, "junk": LONG}, "tool_choice.junk"),
        ({**ALLOWED, LONG: None}, f"tool_choice.{'x' * 60}"),
        ({**ALLOWED, "tools": [{**ENTRY, "junk": LONG}]}, "tool_choice.tools[0].junk"),
        ({**ALLOWED, "tools": [ENTRY] * 1025}, "tool_choice"),
        ({**ALLOWED, "tools": [{**ENTRY, "name": LONG}]}, "tool_choice"),
        *(({**ALLOWED, "mode": LONG}, "tool_choice"), ({"type": LONG}, "tool_choice")),
        (LONG, "tool_choice"),
    ]
    for choice, param in cases:
        with fails_with((InvalidRequest, UnsupportedParameter), param=param) as raised:
            parse(tools=[TOOL], tool_choice=choice)
        assert len(raised.value.message) < 500


def test_a_formats_texts_are_bounded() -> None:
    wanted = {"type": "json_schema", "schema": {"type": "object"}}
    most = {**wanted, "name": "n" * 64, "description": "d" * (2**14 - 2)}
    assert parse(text={"format": most}).repeated["text"]["format"] == most
    for field, value in (("name", "n" * 65), ("name", ""), ("description", "d" * (2**14 - 1))):
        with fails_with(InvalidRequest, param=f"text.format.{field}"):
            parse(text={"format": {**most, field: value}})


def _answer(**fields: Any) -> ResponsesEncoder:
    call = parse(mode="eval", **fields)
    head = Head(f"resp_{HEX}", 1.5, call.chat.gconfig, 10)
    # Of a chat format it takes the spans alone, and of what writes log-probabilities nothing.
    chat: Any = SimpleNamespace(spans=TokenSpans({}))
    return ResponsesEncoder(call, head, None, chat)  # type: ignore[arg-type]


def test_a_whole_answer_has_its_items_and_encrypted_reasoning_where_asked_for() -> None:
    interaction = recorded(content='a "é🙂', reasoning_content="rs", tool_calls=[CHAT_CALL])
    interaction.finish_reason = "tool_calls"
    for include in ([], ["reasoning.encrypted_content"]):
        answer = _answer(tools=[TOOL], instructions="x", metadata={"a": 1}, include=include)
        whole = answer.whole([interaction])
        response = valid_response(whole)
        assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
        assert response.output_text == 'a "é🙂'
        assert (b"encrypted_content" in whole) == bool(include)
        # Whoever takes a stream up late has all that was said in one delta.
        call = {"index": 0, **CHAT_CALL}
        said = MessageDelta(content='a "é🙂', reasoning_content="rs", tool_calls=[call])
        answer = _answer(tools=[TOOL], instructions="x", metadata={"a": 1}, include=include)
        stream = answer.start(0) + answer.delta(Delta(said, [3], [-0.5]))
        stream += answer.end(0, interaction) + answer.last([interaction])
        last = valid_events(stream)[-1]
        assert (last["type"], last["response"]) == ("response.completed", orjson.loads(whole))


def test_a_stream_that_breaks_keeps_what_was_whole() -> None:
    answer = _answer()
    steps = [MessageDelta(reasoning_content="rs"), MessageDelta(content='a "')]
    stream = answer.start(0) + b"".join(answer.delta(Delta(each, [3], [-0.5])) for each in steps)
    stream += answer.failed(EngineUnavailable("gone", retry_after=1))
    last = valid_events(stream)[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "gone"}
    assert [item["type"] for item in last["response"]["output"]] == ["reasoning"]


def test_a_finish_reason_becomes_the_streams_last_event() -> None:
    reasons: dict[Any, str] = {"length": "incomplete", "abort": "failed", "stop": "completed"}
    for reason, status in reasons.items():
        interaction = recorded(content="")
        interaction.finish_reason = reason
        answer = _answer()
        stream = answer.start(0) + answer.end(0, interaction) + answer.last([interaction])
        last = valid_events(stream)[-1]
        assert (last["type"], last["response"]["status"]) == (f"response.{status}", status)
        (item,) = last["response"]["output"]
        assert item["type"] == "message" and item["content"][0]["text"] == ""
        assert last["response"] == orjson.loads(_answer().whole([interaction]))
