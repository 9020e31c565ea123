"""What an answer says, in the order in which it was sampled."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from any_agent.chat.output.message import MessageBuilder, MessageDelta, ParsedMessage, ToolCallIds
from any_agent.completions.encoders.output_order import parts_of
from tests.support.records import make_interaction

Step = tuple[str, str]
STEPS = st.lists(
    st.tuples(st.sampled_from(["reasoning", "content", "call"]), st.text("a \n", max_size=4)),
    max_size=8,
)


def built(steps: list[Step]) -> tuple[list[MessageDelta], ParsedMessage]:
    builder = MessageBuilder(ToolCallIds([1]))
    deltas: list[MessageDelta] = []
    for kind, text in steps:
        if kind == "call":
            builder.open_call("f")
            builder.arguments(text)
            builder.close_call()
        else:
            getattr(builder, kind)(text)
        deltas += builder.take_deltas()
    return deltas, builder.message()


def streamed(deltas: list[MessageDelta]) -> list[tuple[str, Any]]:
    """The parts of a stream."""
    out: list[tuple[str, Any]] = []
    for delta in deltas:
        if delta.tool_calls:
            (call,) = delta.tool_calls
            if "id" in call:
                out.append(("call", call["id"]))
            continue
        kind = "content" if delta.content is not None else "reasoning"
        text = delta.content or delta.reasoning_content or ""
        if out and out[-1][0] == kind:
            out[-1] = (kind, out[-1][1] + text)
        else:
            out.append((kind, text))
    return out


def recorded(parsed: ParsedMessage) -> list[tuple[str, Any]]:
    request = {"order": [list(each) for each in parsed.order]} if parsed.order else {}
    interaction = make_interaction("a", output_message=parsed.to_message(), request=request)
    return [(p.kind, p.call["id"] if p.call else p.text) for p in parts_of(interaction)]


@given(STEPS)
def test_the_parts_of_a_record_are_those_of_its_stream(steps: list[Step]) -> None:
    deltas, parsed = built(steps)
    assert recorded(parsed) == streamed(deltas)


def test_the_usual_order_is_not_written_down() -> None:
    assert built([("reasoning", "r"), ("content", "c"), ("call", "{}")])[1].order == []
    unusual = built([("content", "a"), ("call", "{}"), ("content", "\n\nb")])[1]
    assert unusual.order == [("content", 1), ("call", 1), ("content", 3)]
    assert unusual.content == "a\n\nb"
