"""Putting a message together while its stream leaves."""

from __future__ import annotations

from typing import Any

from any_agent.chat.output.message import MessageDelta, Order, ParsedMessage
from any_agent.chat.output.tool_call_ids import ToolCallIds

_CONTENT = -1
_REASONING = -2
_RANKS = {_REASONING: 0, _CONTENT: 1}
_CALL_RANK = 2


class WhitespaceTrimmer:
    """Text without the white space at its two ends, released as soon as it is inside."""

    __slots__ = ("_space", "_strip", "parts")

    def __init__(self, strip: str | None = None) -> None:
        """``strip``: what counts as white space."""
        self.parts: list[str] = []
        self._space: list[str] = []
        self._strip = strip

    def push(self, text: str) -> str:
        if not self.parts:
            text = text.lstrip(self._strip)
        body = text.rstrip(self._strip)
        if not body:
            if text:
                self._space.append(text)
            return ""
        visible = body
        if self._space:
            self._space.append(body)
            visible = "".join(self._space)
            self._space = []
        if len(body) != len(text):
            self._space.append(text[len(body) :])
        self.parts.append(visible)
        return visible

    def text(self) -> str:
        return "".join(self.parts)


class MessageBuilder:
    """Takes the message's parts in order; ``take`` gives the stream's steps so far.

    Neighbouring steps of one kind leave as one.
    """

    def __init__(self, call_ids: ToolCallIds) -> None:
        self._call_ids = call_ids
        self._content = WhitespaceTrimmer()
        self._reasoning = WhitespaceTrimmer()
        self._calls: list[dict[str, Any]] = []
        self._arguments: list[list[str]] = []
        self._since_call: list[str] = []
        self._out: list[MessageDelta] = []
        self._run: list[str] = []
        self._run_kind = _CONTENT
        self._order: list[list[int]] = []
        """Kinds, and how many characters of each in a row."""

    def content(self, text: str) -> None:
        visible = self._content.push(text)
        if visible:
            self._emit(_CONTENT, visible)

    def reasoning(self, text: str) -> None:
        visible = self._reasoning.push(text)
        if visible:
            self._emit(_REASONING, visible)

    def open_call(self, name: str) -> None:
        index = len(self._calls)
        call_id = self._call_ids.make(self._since_call, index, name)
        self._since_call = []
        entry = {"id": call_id, "type": "function"}
        self._calls.append({**entry, "function": {"name": name}})
        self._arguments.append([])
        self._order.append([index, 0])
        self._end_run()
        first = {"index": index, **entry, "function": {"name": name, "arguments": ""}}
        self._out.append(MessageDelta(tool_calls=[first]))

    def arguments(self, text: str) -> None:
        """More of the arguments of the call that was opened last."""
        if text:
            self._arguments[-1].append(text)
            self._emit(len(self._calls) - 1, text)

    def close_call(self) -> None:
        """The call is whole: where the model wrote no arguments, there are none."""
        if not self._arguments[-1]:
            self.arguments("{}")

    def take(self) -> list[MessageDelta]:
        self._end_run()
        # Never the same list twice: its taker may add to it.
        out, self._out = self._out, []
        return out

    def message(self) -> ParsedMessage:
        calls = [
            {**call, "function": {**call["function"], "arguments": "".join(parts)}}
            for call, parts in zip(self._calls, self._arguments, strict=True)
        ]
        reasoning = self._reasoning.text() or None
        return ParsedMessage(self._content.text(), reasoning, calls, self._unusual_order())

    def _unusual_order(self) -> Order:
        kinds = [kind for kind, _ in self._order]
        ranks = [_RANKS.get(kind, _CALL_RANK) for kind in kinds]
        if ranks == sorted(ranks):
            return []
        return [
            ("call", 1) if kind >= 0 else ("content" if kind == _CONTENT else "reasoning", length)
            for kind, length in self._order
        ]

    def _emit(self, kind: int, text: str) -> None:
        """``kind``: a call's index, or what else it is."""
        if kind != self._run_kind:
            self._end_run()
            self._run_kind = kind
        if self._order and self._order[-1][0] == kind:
            self._order[-1][1] += len(text)
        else:
            self._order.append([kind, len(text)])
        self._run.append(text)
        self._since_call.append(text)

    def _end_run(self) -> None:
        if not self._run:
            return
        text = "".join(self._run)
        self._run = []
        if self._run_kind == _CONTENT:
            self._out.append(MessageDelta(content=text))
        elif self._run_kind == _REASONING:
            self._out.append(MessageDelta(reasoning_content=text))
        else:
            step = {"index": self._run_kind, "function": {"arguments": text}}
            self._out.append(MessageDelta(tool_calls=[step]))
