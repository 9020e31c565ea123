"""Calls as turns of a conversation, and messages of any shape as pieces of text."""

from __future__ import annotations

from typing import Any

import pytest

from router.dashboard.trajectory import message_of, turns_of


def call(number: int, parent: int | None, continuation: str = "exact") -> dict[str, Any]:
    return {
        "id": f"c{number}",
        "parent_id": None if parent is None else f"c{parent}",
        "number": number,
        "continuation": continuation,
        "message_delta": [{"role": "user", "content": f"m{number}"}],
        "output_message": {"role": "assistant", "content": "a"},
    }


def test_the_places_of_calls_in_their_tree() -> None:
    calls = [
        call(1, None, "root"),
        call(2, 1),
        call(3, 1),
        call(4, 2, "branch"),
        call(5, None, "root"),
        call(6, 5),
    ]
    turns = turns_of(calls, [{"interaction_id": "c3", "name": "style", "value": 1.0}])
    assert [turn.place for turn in turns] == [
        *("first", "next", "continues", "branch", "branch", "next")
    ]
    assert [turn.parent for turn in turns] == [None, 1, 1, 2, None, 5]
    assert [len(turn.rewards) for turn in turns] == [0, 0, 1, 0, 0, 0]
    # A page begins below a call that it does not show.
    (turn,) = turns_of([call(26, 25)], [])
    assert (turn.place, turn.parent) == ("continues", None)


@pytest.mark.parametrize(
    ("message", "pieces"),
    [
        ({"role": "user", "content": "hi"}, [("text", "hi")]),
        ({"role": "user", "content": None}, []),
        ({"role": "assistant"}, []),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, "b", {"type": "image"}, 3]},
            [("text", "a"), ("text", "b"), ("other", '{\n  "type": "image"\n}'), ("other", "3")],
        ),
        (
            {"role": "assistant", "reasoning_content": "hm", "content": "so"},
            [("reasoning", "hm"), ("text", "so")],
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
            [("tool", "{}")],
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}, 7]},
            [("tool", "{}"), ("other", "7")],
        ),
        ({"role": "assistant", "tool_calls": {"a": 1}}, []),
    ],
)
def test_messages_in_pieces(message: dict[str, Any], pieces: list[tuple[str, str]]) -> None:
    assert [(piece.kind, piece.text) for piece in message_of(message).pieces] == pieces
