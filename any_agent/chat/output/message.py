"""The parsed message of an output, and the deltas of its stream."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from any_agent.types import IdArray, Message

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


_CONTENT = -1
_REASONING = -2
_RANKS = {_REASONING: 0, _CONTENT: 1}
_CALL_RANK = 2


class ToolCallIds:
    """Makes ids ``call_<hex>``, equal for the same seed, prompt and output so far.

    An id is known when its call opens. Each text is hashed once, however many calls an output has;
    without a call nothing is hashed.
    """

    def __init__(self, prompt_ids: Sequence[int] | IdArray, seed: bytes = b"") -> None:
        """``seed``: another answer's seed, even to the same prompt, gives other ids."""
        self._prompt_ids = prompt_ids
        self._seed = seed
        self._hash: hashlib.blake2b | None = None

    def make(self, since: Iterable[str], index: int, name: str) -> str:
        """``since``: the output's texts after the last call's opening."""
        if self._hash is None:
            packed = np.asarray(self._prompt_ids, dtype="<i4").tobytes()
            seed = hashlib.blake2b(self._seed).digest()
            self._hash = hashlib.blake2b(packed, digest_size=12, key=seed)
        text = f"{''.join(since)}\0{index}\0{name}\0"
        self._hash.update(text.encode(errors="surrogatepass"))
        return "call_" + self._hash.hexdigest()


class WhitespaceTrimmer:
    """Text without the white space at its two ends, released as soon as it is inside."""

    __slots__ = ("_space", "_strip", "parts")

    def __init__(self, strip: str | None = None) -> None:
        """``strip``: the characters that count as white space."""
        self.parts: list[str] = []
        self._space: list[str] = []
        self._strip = strip

    def push(self, text: str) -> str:
        if not self.parts:
            text = text.lstrip(self._strip)
        return self._inside(text)

    def text(self) -> str:
        return "".join(self.parts)

    def _inside(self, text: str) -> str:
        """Return what is text for certain: white space at its end may be the end's."""
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


class ContentText(WhitespaceTrimmer):
    """Content as sampled, but for the white space that templates put around it.

    This is what one puts at an answer's beginning, line breaks after reasoning and calls, and white
    space before calls: what may be that is held back until text or the end follows.
    """

    __slots__ = ("_drops_breaks", "_lead")

    def __init__(self, *, lead: str, holds: bool) -> None:
        """``lead``: the white space at an answer's beginning. ``holds``: calls may follow."""
        super().__init__(None if holds else "")
        self._lead = lead
        self._drops_breaks = False

    def drop_breaks(self) -> None:
        """Drop white space so far, and line breaks from now on, if there was no text yet."""
        self._lead = ""
        if not self.parts:
            self._space, self._drops_breaks = [], True

    def push(self, text: str) -> str:
        """Return what is certainly content now."""
        while self._lead and text:
            if text[0] != self._lead[0]:
                self._lead = ""
                break
            text, self._lead = text[1:], self._lead[1:]
        if self._drops_breaks:
            text = text.lstrip("\r\n")
            self._drops_breaks = not text
        return self._inside(text)

    def end(self) -> str:
        """Return what was held back, where no call came after it."""
        text, self._space = "".join(self._space), []
        if text:
            self.parts.append(text)
        return text


class MessageBuilder:
    """Takes the message's parts in order, and makes the deltas of its stream.

    Neighbouring parts of one kind become one delta.
    """

    def __init__(
        self,
        call_ids: ToolCallIds,
        *,
        lead: str = "",
        has_calls: bool = True,
        custom: Collection[str] = (),
    ) -> None:
        """``lead``: the white space that the template puts at an answer's beginning.

        ``has_calls``: calls may come. ``custom``: the names of tools whose calls have the type
        "custom".
        """
        self._custom = custom
        self._call_ids = call_ids
        self._content = ContentText(lead=lead, holds=has_calls)
        self._called = False
        """True if a call came after the last content."""
        self._reasoning = WhitespaceTrimmer()
        self._calls: list[dict[str, Any]] = []
        self._arguments: list[list[str]] = []
        self._since_call: list[str] = []
        self._out: list[MessageDelta] = []
        self._run: list[str] = []
        self._run_kind = _CONTENT
        self._order: list[list[int]] = []
        """Pairs of a kind and the number of its characters in a row."""

    def content(self, text: str) -> None:
        visible = self._content.push(text)
        if visible:
            self._called = False
            self._emit(_CONTENT, visible)

    def reasoning(self, text: str) -> None:
        visible = self._reasoning.push(text)
        if visible:
            self._emit(_REASONING, visible)

    def end_reasoning(self) -> None:
        """Take the line breaks that follow as the template's."""
        self._content.drop_breaks()

    def end(self) -> None:
        """End the message: no call follows the content's last white space."""
        if not self._called and (text := self._content.end()):
            self._emit(_CONTENT, text)

    def open_call(self, name: str) -> None:
        self._called = True
        self._content.drop_breaks()
        index = len(self._calls)
        call_id = self._call_ids.make(self._since_call, index, name)
        self._since_call = []
        entry = {"id": call_id, "type": "custom" if name in self._custom else "function"}
        self._calls.append({**entry, "function": {"name": name}})
        self._arguments.append([])
        self._order.append([index, 0])
        self._end_run()
        first = {"index": index, **entry, "function": {"name": name, "arguments": ""}}
        self._out.append(MessageDelta(tool_calls=[first]))

    def arguments(self, text: str) -> None:
        """Add to the arguments of the call that was opened last."""
        if text:
            self._arguments[-1].append(text)
            self._emit(len(self._calls) - 1, text)

    def close_call(self) -> None:
        """End the last call; without any arguments it gets an empty object."""
        if not self._arguments[-1]:
            self.arguments("{}")

    def take_deltas(self) -> list[MessageDelta]:
        """Return the deltas since the last time."""
        self._end_run()
        # Never the same list twice: the caller may add to it.
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
        """``kind``: a call's index, or one of the constants above."""
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
