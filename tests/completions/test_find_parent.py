"""Which recorded interaction a request continues, without a tokenizer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from any_agent.chat import chain_keys
from any_agent.completions.prompt import ParentMatch, find_parent
from any_agent.errors import ContextLengthExceeded
from any_agent.record import InteractionTree, strip_content
from any_agent.types import (
    Interaction,
    Message,
)
from tests.support.completions.params import parse
from tests.support.errors import fails_with
from tests.support.records import make_interaction

SYSTEM: Message = {"role": "system", "content": "You count."}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


class Talks:
    """A session's tree, and its requests as an agent would make them."""

    def __init__(self) -> None:
        self.tree = InteractionTree()
        self.texts = True

    def find(
        self, messages: list[Message], tools: Any = None, *, context: int = 10_000
    ) -> ParentMatch:
        call = parse(messages=messages, tools=tools)
        found = find_parent(call, self.tree, context_length=context, longest_token=10)
        if found.noted is not None:
            self.tree.seen.note(*found.noted)
        return found

    def answer(
        self, messages: list[Message], answer: Message, tools: Any = None, **fields: Any
    ) -> Interaction:
        """Record an answer to a request."""
        found = self.find(messages, tools)
        # As if whatever has a parent could be continued exactly.
        interaction = make_interaction(
            str(len(self.tree)),
            found.parent.id if found.parent is not None else None,
            message_delta=messages[found.covered :],
            output_message=answer,
            **fields,
        )
        (key,) = chain_keys([answer], tools, start=found.key)
        self.tree.add(interaction if self.texts else strip_content(interaction), key)
        return interaction

    def forget(self) -> None:
        """As after a restart, or a while in the journal alone."""
        before, self.tree = self.tree, InteractionTree()
        for interaction in before:
            self.tree.add(interaction, before.key(interaction.id))

    def parent(self, messages: list[Message], tools: Any = None) -> tuple[str | None, int]:
        found = self.find(messages, tools)
        return (found.parent.id if found.parent is not None else None), found.covered


@pytest.fixture(params=["texts", "no texts", "forgotten"])
def talks(request: pytest.FixtureRequest) -> Talks:
    talks = Talks()
    talks.texts = request.param != "no texts"
    if request.param == "forgotten":
        answer = talks.answer

        def and_forget(*args: Any, **fields: Any) -> Interaction:
            interaction = answer(*args, **fields)
            talks.forget()
            return interaction

        talks.answer = and_forget  # type: ignore[method-assign]
    return talks


def test_a_request_continues_its_longest_recorded_prefix(talks: Talks) -> None:
    first = [SYSTEM, user("1")]
    talks.answer(first, said("one"))
    second = [*first, said("one"), user("2")]
    assert talks.parent(second) == ("0", 3)
    talks.answer(second, said("two"))
    third = [*second, said("two"), user("3")]
    assert talks.parent(third) == ("1", 5)
    assert talks.parent(third[:4]) == ("0", 3)
    assert talks.parent(third[:5]) == ("1", 5)
    assert talks.parent(third[:2]) == (None, 0)
    # From an earlier turn, otherwise.
    assert talks.parent([*second, said("other"), user("3")]) == ("0", 3)


def test_agents_that_take_turns_continue_their_own_talks(talks: Talks) -> None:
    agents = {name: [{"role": "system", "content": name}, user("go")] for name in "abc"}
    latest: dict[str, str] = {}
    for turn in range(12):
        for name, messages in agents.items():
            parent, covered = talks.parent(messages)
            assert parent == latest.get(name)
            assert covered == (len(messages) - 1 if turn else 0)
            answer = said(f"answer {turn}")
            latest[name] = talks.answer(messages, answer).id
            messages += [answer, user("go on")]


def test_the_choice_that_comes_back_is_continued(talks: Talks) -> None:
    for text in ("one", "two", "one"):
        talks.answer([user("1")], said(text))
    talks.answer([user("1")], said("one"), untrainable_reason="undelivered")
    assert talks.parent([user("1"), said("two"), user("2")]) == ("1", 2)
    # Of equal ones the latest that was received.
    assert talks.parent([user("1"), said("one"), user("2")]) == ("2", 2)


@pytest.mark.parametrize("where", ["reasoning_content", "reasoning", "content"])
def test_of_equal_answers_the_one_with_the_same_reasoning_is_continued(
    talks: Talks, where: str
) -> None:
    for thought in ("first", "second\n", "third"):
        talks.answer([user("1")], said("x", reasoning_content=thought))

    def found(thought: str) -> ParentMatch:
        echo = said("x", **{where: thought})
        if where == "content":
            echo = said(f"<think>\n{thought}\n</think>\n\nx")
        return talks.find([user("1"), echo, user("2")])

    assert [found(t).parent.id for t in ("first", " second", "third")] == ["0", "1", "2"]  # type: ignore[union-attr]
    assert talks.parent([user("1"), said("x"), user("2")]) == ("2", 2)
    rewritten = found("what nobody thought")
    assert (rewritten.parent, rewritten.reason) == (None, "assistant_rewritten")


def test_reasoning_counts_in_all_of_the_past(talks: Talks) -> None:
    for thought in ("first", "second"):
        talks.answer([user("1")], said("x", reasoning_content=thought))

    def past(thought: str) -> list[Message]:
        return [user("1"), said("x", reasoning_content=thought), user("2")]

    child = talks.answer(past("first"), said("y"))
    assert child.parent_id == "0"
    assert talks.parent([*past("first"), said("y"), user("3")]) == (child.id, 4)
    # The same words, but the other one's child.
    assert talks.parent([*past("second"), said("y"), user("3")]) == ("1", 2)
    assert talks.parent([*past("second"), said("y"), user("3"), said("z"), user("4")]) == ("1", 2)


def test_an_equal_answer_that_comes_later_changes_no_parent(talks: Talks) -> None:
    """A request that was seen before the other answer was there."""
    talks.answer([user("1")], said("x", reasoning_content="so"))
    again = [user("1"), said("x", reasoning_content="so"), user("2")]
    assert talks.parent(again) == ("0", 2)
    late = talks.find(again).noted
    talks.answer([user("1")], said("x", reasoning_content="thus"))
    assert talks.parent(again) == ("0", 2)
    assert late is not None
    talks.tree.seen.note(*late)
    assert talks.parent(again) == ("0", 2)


def test_a_parent_that_is_missing_or_cut_off_has_its_reason(talks: Talks) -> None:
    first = [SYSTEM, user("1")]
    assert talks.find(first, TOOLS).reason is None
    talks.answer(first, said("one"), TOOLS)
    talks.answer([*first, said("one"), user("2")], said("tw"), TOOLS, finish_reason="abort")
    second = [*first, said("one"), user("2")]
    other = {"role": "system", "content": "You count, slowly."}

    def why(messages: list[Message], tools: Any = TOOLS) -> tuple[bool, Any]:
        found = talks.find(messages, tools)
        return found.parent is not None, found.reason

    assert why(second) == (True, None)
    assert why([*second, said("tw"), user("3")]) == (True, "parent_aborted")
    assert why(second, None) == (False, "tools_changed")
    assert why([other, *second[1:]]) == (False, "system_changed")
    assert why(second[1:]) == (False, "system_changed")
    assert why([SYSTEM, user("so far: one"), said("ok"), user("2")]) == (False, "history_rewritten")
    assert why([SYSTEM, user("something else")]) == (False, "new_conversation")
    assert why([other, user("1"), said("un"), user("2")]) == (False, "new_conversation")
    assert why(first) == (False, "new_conversation")


def test_a_conversation_that_cannot_fit_is_refused_by_its_characters() -> None:
    talks = Talks()
    long = [user("x" * 50), said("y" * 30), user("z" * 20)]
    talks.answer(long[:1], long[1])
    with fails_with(ContextLengthExceeded, "100 characters"):
        talks.find(long, context=9)
    with fails_with(ContextLengthExceeded, "3 messages"):
        talks.find(long, context=2)
    found = talks.find(long, context=10)
    assert 20 <= found.new_characters < 60
    assert 100 <= found.characters < 250


BIG = "x" * 100_000
LONG: tuple[Any, ...] = ({"a": BIG}, BIG)
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    "more",
    [
        *({"tool_calls": [{**CALL, "function": {"name": "f", "arguments": a}}]} for a in LONG),
        {"tool_calls": [{**CALL, "function": {"name": BIG, "arguments": "{}"}}]},
        {"tool_calls": [{**CALL, "id": BIG}]},
        {"tool_calls": [CALL] * 2000},
        {"reasoning_content": BIG},
        {"name": BIG},
        {"content": [{"type": "text", "text": ""}] * 4000},
    ],
)
def test_every_text_that_is_rendered_counts_as_characters(more: dict[str, Any]) -> None:
    """A rendering that takes long is known as such, wherever in the messages its text stands."""
    messages = [user("1"), {**said("2"), **more}, user("3")]
    found = Talks().find(messages)
    assert found.new_characters > 65_536
    assert found.characters == found.new_characters
    talks = Talks()
    talks.answer(messages, said("4"))
    continued = talks.find([*messages, said("4"), user("5")])
    assert continued.parent is not None
    assert continued.new_characters < 100
    assert continued.characters > 65_536, "it is rendered anew if it cannot be continued"
    with fails_with(ContextLengthExceeded, "bytes"):
        Talks().find(messages * 40, context=200)
    tool = {"type": "function", "function": {"name": "f", "description": BIG}}
    assert Talks().find([user("1")], [tool]).new_characters > 65_536


@settings(deadline=None)
@given(
    turns=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3), st.booleans()), max_size=12)
)  # fmt: skip
def test_what_is_remembered_changes_nothing(turns: list[tuple[int, int, bool]]) -> None:
    """A tree that remembers earlier requests, and one that never does, find the same."""
    talks, plain = Talks(), Talks()
    requests: list[list[Message]] = [[SYSTEM, user("0")]]
    for number, (which, more, rewrite) in enumerate(turns):
        messages = requests[which % len(requests)]
        plain.tree.seen = type(plain.tree.seen)()
        one, two = talks.find(messages), plain.find(messages)
        assert (one.key, one.covered, one.reason) == (two.key, two.covered, two.reason)
        assert (one.parent and one.parent.id) == (two.parent and two.parent.id)
        answer = said(f"answer {number % 4}")
        plain.tree.seen = type(plain.tree.seen)()
        talks.answer(messages, answer)
        plain.answer(messages, answer)
        echo = said("rewritten") if rewrite else answer
        requests.append([*messages, echo, *(user(f"{number % 3} {k}") for k in range(more))])
