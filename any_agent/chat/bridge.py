"""Exact continuation for any chat template: learn what it writes between two turns.

A made-up conversation is rendered twice, ending at an assistant turn and going on with the new
messages. Where both agree up to the end of that turn, what follows in the second is what this
template writes for the new messages, and it is encoded alone: nothing that was sampled is
tokenised again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from any_agent.types import Message, Tool

_SAID = "any0agent0said"
"""The made-up answer; a word that no template writes itself."""
_EMPTY_THINK = re.compile(r"<think>\s*</think>\s*")


def derive_bridge(
    render_text: Callable[[list[Message], list[Tool] | None, bool], str],
    encode: Callable[[str], list[int]],
    turn_ends: Sequence[tuple[int, str]],
    prompt_ids: list[int],
    output_ids: list[int],
    new_messages: list[Message],
    tools: list[Tool] | None,
    *,
    keep_thinking: bool,
) -> list[int] | None:
    """Prompt + output + the new messages up to the generation prompt; None if it cannot be.

    ``render_text(messages, tools, add_generation_prompt)`` is the template; ``turn_ends`` are
    the tokens that may close an assistant turn, with their text. ``keep_thinking``: a template
    that takes thinking out of earlier turns is continued with it all the same.
    """
    past = [{"role": "user", "content": "ok"}, _reply_to(new_messages)]
    before = _split(render_text(past, tools, False), turn_ends)
    after = _split(render_text([*past, *new_messages], tools, True), turn_ends)
    if before is None or after is None or before.end_id != after.end_id:
        return None
    heads = [before.head, after.head]
    if keep_thinking:
        heads = [_EMPTY_THINK.sub("", head) for head in heads]
    if heads[0] != heads[1] or before.rest_of_turn != after.rest_of_turn:
        return None
    if not after.tail.startswith(before.tail):
        return None
    ended = bool(output_ids) and output_ids[-1] in {i for i, _ in turn_ends}
    return [*prompt_ids, *output_ids, *([] if ended else [after.end_id]), *encode(after.tail)]


class _Turn:
    """A rendered text around the made-up answer."""

    def __init__(self, head: str, rest_of_turn: str, end_id: int, tail: str) -> None:
        self.head = head
        self.rest_of_turn = rest_of_turn
        self.end_id = end_id
        self.tail = tail


def _split(text: str, turn_ends: Sequence[tuple[int, str]]) -> _Turn | None:
    head, said, rest = text.partition(_SAID)
    found = [(at, i, end) for i, end in turn_ends if (at := rest.find(end)) >= 0]
    if not said or not found:
        return None
    at, end_id, end = min(found)
    return _Turn(head, rest[:at], end_id, rest[at + len(end) :])


def _reply_to(new_messages: list[Message]) -> Message:
    """An assistant turn that the new messages may follow: results need calls."""
    reply: Message = {"role": "assistant", "content": _SAID}
    calls: list[dict[str, Any]] = [
        {
            "id": m.get("tool_call_id", f"call_{n}"),
            "type": "function",
            "function": {"name": m.get("name", "ok"), "arguments": "{}"},
        }
        for n, m in enumerate(new_messages)
        if m["role"] == "tool"
    ]
    return reply | {"tool_calls": calls} if calls else reply
