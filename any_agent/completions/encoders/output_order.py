"""The parts of an answer, in the order in which they were sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from any_agent.types import Interaction, Message

Kind = Literal["reasoning", "content", "call"]


@dataclass(frozen=True, slots=True)
class OutputPart:
    """A run of reasoning or content, or one call."""

    kind: Kind
    text: str = ""
    """The text; of a call its arguments."""
    call: dict[str, Any] | None = None
    """The tool call in OpenAI's form."""


def parts_of(interaction: Interaction) -> list[OutputPart]:
    """Return the parts of a recorded answer, none of them empty.

    A stream's deltas have the same parts: one ends where another kind, or another call, begins.
    """
    order = interaction.request.get("order")
    message = interaction.output_message
    return _in_order(message, order) if order else message_parts(message)


def message_parts(message: Message) -> list[OutputPart]:
    """Return the parts of an assistant's message in the usual order, none of them empty."""
    out = []
    if reasoning := message.get("reasoning_content"):
        out.append(OutputPart("reasoning", reasoning))
    if content := message.get("content"):
        out.append(OutputPart("content", content))
    return out + [_call_part(call) for call in message.get("tool_calls") or ()]


def _call_part(call: dict[str, Any]) -> OutputPart:
    return OutputPart("call", call["function"]["arguments"], call)


def _in_order(message: Message, order: list[list[Any]]) -> list[OutputPart]:
    texts = {
        "reasoning": message.get("reasoning_content") or "",
        "content": message.get("content") or "",
    }
    at = {"reasoning": 0, "content": 0}
    calls = iter(message.get("tool_calls") or ())
    out = []
    for kind, length in order:
        if kind == "call":
            out.append(_call_part(next(calls)))
            continue
        start = at[kind]
        at[kind] = start + length
        out.append(OutputPart(kind, texts[kind][start : start + length]))
    return out
