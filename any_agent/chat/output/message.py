"""The parsed message of an output, and the deltas of its stream."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from any_agent.types import Message

Order: TypeAlias = list[tuple[Literal["reasoning", "content", "call"], int]]
"""The order of an output's parts: the number of characters of one kind in a row, or one call."""


@dataclass(slots=True)
class ParsedMessage:
    """One parsed output; ``tool_calls`` in OpenAI's form with ``call_<hex>`` ids."""

    content: str
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    order: Order = field(default_factory=list, compare=False)
    """Empty for the usual order: reasoning, content, calls."""

    def to_message(self) -> Message:
        """Return the message in OpenAI's form; content is None if there are only tool calls."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["content"] = self.content or None
            message["tool_calls"] = self.tool_calls
        return message


@dataclass(slots=True)
class MessageDelta:
    """One step of a stream in OpenAI's form; a parser sets exactly one of the fields.

    A call comes as ``{index, id, type, function: {name, arguments: ""}}``, then as deltas
    ``{index, function: {arguments}}``.
    """

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


def merge_deltas(deltas: Iterable[MessageDelta]) -> MessageDelta:
    """Merge deltas: all content, all reasoning, and each call's arguments joined.

    The given deltas stay as they are. The cost is linear in the text.
    """
    content: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, dict[str, Any]] = {}
    arguments: dict[int, list[str]] = {}
    for delta in deltas:
        if delta.content is not None:
            content.append(delta.content)
        if delta.reasoning_content is not None:
            reasoning.append(delta.reasoning_content)
        for call in delta.tool_calls or ():
            calls.setdefault(call["index"], call)
            arguments.setdefault(call["index"], []).append(call["function"]["arguments"])
    merged = [
        {**call, "function": {**call["function"], "arguments": "".join(arguments[index])}}
        for index, call in calls.items()
    ]
    return MessageDelta(
        "".join(content) if content else None,
        "".join(reasoning) if reasoning else None,
        merged or None,
    )
