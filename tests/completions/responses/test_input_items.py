"""Input items to messages: what belongs together, what is refused, and how it is named."""

from __future__ import annotations

from typing import Any

import pytest

from any_agent.completions.responses.history import ItemHistory, messages_before, parted
from any_agent.completions.responses.input_items import messages_of
from any_agent.completions.responses.output_items import decoded, encoded
from any_agent.completions.responses.stored_response import answer_of, deleted_record, input_items
from any_agent.errors import AnyAgentError, InvalidRequest, NotFound, UnsupportedParameter
from any_agent.record import InteractionTree, strip_content
from any_agent.types import (
    Interaction,
    Message,
)
from tests.support.errors import fails_with
from tests.support.records import make_interaction

HEX = "0123456789abcdef" * 2
ID = f"resp_{HEX}"
USER = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
CHAT_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]}


def messages(*items: Any, tree: InteractionTree | None = None) -> list[Message]:
    return messages_of(list(items), ItemHistory(tree))


def assistant(**fields: Any) -> Message:
    return {"role": "assistant", "content": None, **fields}


def recorded(
    id: str = ID,
    parent: str | None = None,
    delta: Any = None,
    *,
    instructed: int = 0,
    **out: Any,
) -> Interaction:
    return make_interaction(
        id,
        parent,
        output=(3,),
        message_delta=[USER] if delta is None else delta,
        output_message={"role": "assistant", "content": "a", **out},
        model="m",
        request={"responses": {"instructions": instructed} if instructed else {}},
        created_at=1.0,
    )


def tree_of(*interactions: Interaction) -> InteractionTree:
    return InteractionTree.from_interactions(interactions)


SAYING: list[tuple[list[Any], list[Message]]] = [
    ([{"role": "developer", "content": "d"}], [{"role": "system", "content": "d"}]),
    ([{"role": "user", "content": [{"type": "input_text", "text": t} for t in "hi"]}], [USER]),
    # What one answer said is one message.
    (
        [THOUGHT, SAID, CALL],
        [assistant(reasoning_content="r", content="a", tool_calls=[CHAT_CALL])],
    ),
    ([CALL, CALL], [assistant(tool_calls=[CHAT_CALL, CHAT_CALL])]),
    ([CALL, SAID], [assistant(tool_calls=[CHAT_CALL], content="a")]),
    # Two texts in a row are two answers, and so is what is thought after one.
    ([SAID, SAID], [assistant(content="a"), assistant(content="a")]),
    ([SAID, THOUGHT], [assistant(content="a"), assistant(reasoning_content="r")]),
    ([CALL, THOUGHT], [assistant(tool_calls=[CHAT_CALL]), assistant(reasoning_content="r")]),
    ([SAID, USER, SAID], [assistant(content="a"), USER, assistant(content="a")]),
    *(
        (
            [{"type": "function_call_output", "call_id": "c", "output": output}],
            [{"role": "tool", "tool_call_id": "c", "content": "7"}],
        )
        for output in ("7", [{"type": "input_text", "text": "7"}])
    ),
    ([{"type": "reasoning", "summary": []}], [assistant()]),
    (
        [{"type": "reasoning", "summary": [], "encrypted_content": encoded("é")}],
        [assistant(reasoning_content="é")],
    ),
    ([{"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}], [assistant()]),
]


def test_items_are_messages() -> None:
    assert messages_of("hi", ItemHistory(None)) == [USER]
    for items, expected in SAYING:
        assert messages(*items) == expected


def test_ids_tell_what_is_of_one_answer() -> None:
    first = [{**SAID, "id": f"msg_{HEX}_{k}"} for k in range(2)]
    assert messages(*first) == [assistant(content="aa")]
    other = {**CALL, "id": f"fc_{'0' * 32}_0"}
    assert len(messages(first[0], other)) == 2


WRONG: list[tuple[Any, type[AnyAgentError], str]] = [
    *((item, InvalidRequest, "") for item in ("x", {}, {"type": 3})),
    *(({"type": kind}, UnsupportedParameter, "") for kind in ("computer_call", "é" * 999)),
    ({"type": "message", "role": "tool"}, InvalidRequest, ".role"),
    ({"role": "user"}, InvalidRequest, ".content"),
    ({"role": "user", "content": [{"type": "input_image"}]}, InvalidRequest, ".content[0]"),
    (
        {"role": "user", "content": [{"type": "input_text", "text": 3}]},
        InvalidRequest,
        ".content[0].text",
    ),
    ({**CALL, "arguments": {}}, InvalidRequest, ".arguments"),
    ({**CALL, "call_id": None}, InvalidRequest, ".call_id"),
    ({"type": "function_call_output", "call_id": "c"}, InvalidRequest, ".output"),
    ({"type": "reasoning", "summary": 3}, InvalidRequest, ".summary"),
    ({"type": "reasoning", "content": [3]}, InvalidRequest, ".content[0]"),
    ({"type": "item_reference"}, InvalidRequest, ".id"),
    ({"type": "item_reference", "id": "x"}, NotFound, ""),
    ({"role": "user", "content": "\ud800"}, InvalidRequest, ".content"),
]


def test_what_is_wrong_is_named_by_its_place() -> None:
    for item, kind, place in WRONG:
        with fails_with(kind, param=f"input[1]{place}") as raised:
            messages(USER, item)
        assert len(raised.value.message) < 600


def test_references_are_items_of_the_sessions_answers() -> None:
    tree = tree_of(recorded(reasoning_content="r", tool_calls=[CHAT_CALL]))
    ids = [f"rs_{HEX}_0", f"msg_{HEX}_1", f"fc_{HEX}_2"]
    said = messages(*({"type": "item_reference", "id": id} for id in ids), tree=tree)
    assert said == [assistant(reasoning_content="r", content="a", tool_calls=[CHAT_CALL])]
    # Without a type, as OpenAI's clients may leave it out.
    assert messages({"id": ids[1]}, tree=tree) == [assistant(content="a")]
    for id in (f"msg_{HEX}_0", f"msg_{HEX}_3", f"msg_{'0' * 32}_1", f"fc_{HEX}_9999"):
        with pytest.raises(NotFound):
            messages({"type": "item_reference", "id": id}, tree=tree)
    # A few bytes each, they would be as many copies of the answer.
    with fails_with(InvalidRequest, code="duplicate_item", param="input[2]"):
        messages({"id": ids[1]}, USER, {"id": ids[1]}, tree=tree)


def test_thousands_of_items_of_an_answer_are_one_message() -> None:
    piece = "x" * 1500
    (message,) = messages(CALL, *[{"role": "assistant", "content": piece}] * 20_000)
    assert message == assistant(content=piece * 20_000, tool_calls=[CHAT_CALL])


def test_messages_before_a_response_are_those_of_its_session() -> None:
    system = {"role": "system", "content": "old"}
    first = recorded(delta=[system, USER], instructed=1)
    second = recorded(f"resp_{'1' * 32}", ID, [{"role": "user", "content": "more"}], instructed=1)
    tree = tree_of(first, second)
    assert messages_before(ID, tree) == [USER, first.output_message]
    assert [m["content"] for m in messages_before(second.id, tree)] == ["hi", "a", "more", "a"]
    for id, known in (("resp_x", tree), (ID, None), ("x" * 99_999, tree)):
        with fails_with(NotFound, code="previous_response_not_found") as raised:
            messages_before(id, known)
        assert len(raised.value.message) < 200
    with fails_with(InvalidRequest, code="content_not_stored"):
        messages_before(ID, tree_of(strip_content(recorded())))


def test_instructions_are_told_from_other_system_messages() -> None:
    for system, lines, instructions, left in (
        (["a"], 1, "a", []),
        (["a\n\n b\n"], 2, "a\n\n b\n", []),
        (["a", "b"], 1, "a", ["b"]),
        # As an earlier request had them in its system messages.
        (["a\nb"], 1, "a", ["b"]),
        (["a\n \n\n b\n"], 1, "a\n ", [" b\n"]),
        (["a", "b\nc", "d"], 2, "a\nb", ["c", "d"]),
        (["", "a"], 1, "\na", []),
        # Of journals that did not count them.
        (["a\nb", "c"], True, "a\nb", ["c"]),
    ):
        delta = [*({"role": "system", "content": text} for text in system), USER]
        interaction = recorded(delta=delta, instructed=lines)
        tree = tree_of(interaction)
        told, messages = parted(interaction, tree)
        assert told == instructions
        assert messages == [*({"role": "system", "content": text} for text in left), USER]
        assert messages_before(ID, tree) == [*messages, interaction.output_message]
    blank = {"role": "system", "content": " \n"}
    for delta, rest in (([blank, USER], [USER]), ([USER], [USER])):
        interaction = recorded(delta=delta)
        interaction.request = {"responses": {"instructions": 0}}
        assert parted(interaction, tree_of(interaction))[1] == rest


def test_a_deleted_answer_is_not_found() -> None:
    interaction = recorded()
    assert answer_of(ID, tree_of(interaction)) is interaction
    interaction.request = deleted_record(interaction)
    tree = tree_of(interaction)
    for read in (
        lambda: answer_of(ID, tree),
        lambda: messages_before(ID, tree),
        lambda: messages({"type": "item_reference", "id": f"msg_{HEX}_0"}, tree=tree),
    ):
        with pytest.raises(NotFound):
            read()


def test_the_input_items_of_an_answer_can_be_sent_again() -> None:
    said = assistant(content="b", reasoning_content="r", tool_calls=[CHAT_CALL])
    told = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "7"}]}
    system = {"role": "system", "content": "s"}
    interaction = recorded(delta=[system, USER, said, told], instructed=1)
    items = input_items(interaction, tree_of(interaction))
    kinds = ["message", "reasoning", "message", "function_call", "function_call_output"]
    assert [item["type"] for item in items] == kinds
    assert len({item["id"] for item in items}) == 5
    # They can be sent as they are.
    told = {**told, "content": "7"}
    assert messages(*items) == [USER, said, told]


def test_encrypted_reasoning_of_others_is_read_as_nothing() -> None:
    for text in ("aa1.", "aa1.%%%", "aa1.gA==", "other", "", "aa1.é"):
        assert not decoded(text)
    assert decoded(encoded("né 🙂")) == "né 🙂"
