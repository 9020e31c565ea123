"""The content of a session's page: its facts, its rewards, and its calls as a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from any_agent.errors import AnyAgentError
from router.dashboard.ranks import RankReader, Visitor

PAGE = 25
"""Calls on one page."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a message: its text, its reasoning, a tool call, or something else."""

    kind: str
    """`text`, `reasoning`, `tool` or `other`."""
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    pieces: Sequence[Piece]


@dataclass(frozen=True, slots=True)
class Turn:
    """One call: the messages that it added, its answer, and how it hangs in the tree."""

    call: Mapping[str, Any]
    messages: Sequence[Message]
    answer: Message
    place: str
    """`first`, `next` (it continues the call above), `continues` or `branch`."""
    parent: int | None
    """The number of the call that it continues."""
    rewards: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class Trajectory:
    info: Mapping[str, Any]
    rewards: Sequence[Mapping[str, Any]] = ()
    """Its rewards, the oldest first, each with the number of its `call`, None for the whole
    session's and a call on another page."""
    turns: Sequence[Turn] = ()
    start: int = 0
    total: int = 0
    next: int | None = None
    cut: bool = False
    problem: str = ""
    """The reason why its calls are not shown; "" where they are."""
    more_rewards: int = 0
    """Earlier rewards, which the history does not show."""


async def read_trajectory(
    ranks: RankReader, visitor: Visitor, session_id: str, start: int
) -> Trajectory:
    """Return a page of a session. Its facts are there also where its calls cannot be read."""
    info = await ranks.of_session(visitor, session_id)
    try:
        page = await ranks.of_session(visitor, session_id, "/interactions", start=start, limit=PAGE)
    except AnyAgentError as error:
        return Trajectory(info, _rewards(info, {}), problem=error.message)
    history = info.get("reward_history") or []
    calls = page["interactions"]
    return Trajectory(
        info,
        _rewards(info, {call["id"]: call["number"] for call in calls}),
        turns_of(calls, history),
        page["start"],
        page["total"],
        page["next"],
        page["cut"],
        more_rewards=max(0, int(info.get("rewards_given") or 0) - len(history)),
    )


def turns_of(
    calls: Sequence[Mapping[str, Any]], history: Sequence[Mapping[str, Any]]
) -> list[Turn]:
    """Return calls as turns; ``history``: the session's rewards."""
    numbers = {call["id"]: call["number"] for call in calls}
    turns: list[Turn] = []
    for call in calls:
        parent = call["parent_id"]
        before = turns[-1].call["id"] if turns else None
        if call["number"] == 1:
            place = "first"
        elif call["continuation"] != "exact":
            place = "branch"
        else:
            place = "next" if parent == before and parent is not None else "continues"
        turns.append(
            Turn(
                call,
                [message_of(message) for message in call["message_delta"]],
                message_of(call["output_message"]),
                place,
                numbers.get(parent),
                [entry for entry in history if entry.get("interaction_id") == call["id"]],
            )
        )
    return turns


def _rewards(info: Mapping[str, Any], numbers: Mapping[str, int]) -> list[Mapping[str, Any]]:
    history = info.get("reward_history") or []
    return [entry | {"call": numbers.get(entry.get("interaction_id"))} for entry in history]


def message_of(message: Mapping[str, Any]) -> Message:
    """Return a message of any of the APIs in pieces; what is not known is shown as JSON."""
    pieces = []
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str) and reasoning:
        pieces.append(Piece("reasoning", "reasoning", reasoning))
    content = message.get("content")
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, str):
            pieces.append(Piece("text", "", part))
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            pieces.append(Piece("text", "", part["text"]))
        elif part is not None:
            pieces.append(Piece("other", "", _plain(part)))
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            name, arguments = function.get("name"), function.get("arguments")
            text = arguments if isinstance(arguments, str) else _plain(arguments)
            pieces.append(Piece("tool", f"calls {name}", text))
        else:
            pieces.append(Piece("other", "", _plain(call)))
    role = str(message.get("role", "?"))
    name = message.get("name") or message.get("tool_call_id")
    return Message(f"{role} {name}" if isinstance(name, str) else role, pieces)


def _plain(value: Any) -> str:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()
