from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from any_agent.chat.output.message import (
    MessageBuilder,
    ToolCallIds,
    WhitespaceTrimmer,
)


@given(st.lists(st.text(alphabet="a \n", max_size=4), max_size=12))
def test_trimmed_text_leaves_as_soon_as_it_is_inside(parts: list[str]) -> None:
    made, out, text = WhitespaceTrimmer(), "", ""
    for part in parts:
        out += made.push(part)
        text += part
        assert out == text.strip()
    assert made.text() == out


@given(st.lists(st.text(alphabet="a \n", max_size=4), max_size=12), st.booleans())
def test_content_is_as_sampled(parts: list[str], has_calls: bool) -> None:
    made, out, text = MessageBuilder(ToolCallIds([1]), has_calls=has_calls), "", ""
    for part in parts:
        made.content(part)
        text += part
        out += "".join(delta.content or "" for delta in made.take_deltas())
        assert out == (text.rstrip() if has_calls else text)
    made.end()
    out += "".join(delta.content or "" for delta in made.take_deltas())
    assert out == made.message().content == text


def test_what_a_template_puts_around_content_is_none_of_it() -> None:
    made = MessageBuilder(ToolCallIds([1]), lead="\n")
    for part in ("\n", "\n a", "\n", " \n"):
        made.content(part)
    made.open_call("f")
    made.close_call()
    made.content("\n")
    made.end()
    assert made.message().content == "\n a"
    made = MessageBuilder(ToolCallIds([1]))
    made.reasoning("r")
    made.end_reasoning()
    for part in ("\n", "\n", "  a", "\n"):
        made.content(part)
    made.end()
    assert made.message().content == "  a\n"


def test_ids_of_calls_are_their_answers_own() -> None:
    ids = {ToolCallIds([1], seed).make((), 0, "add") for seed in (b"", b"a.0", b"a.1", b"x" * 999)}
    assert len(ids) == 4
    assert ToolCallIds([1], b"a.0").make((), 0, "add") in ids
