"""Raw output to reasoning, content and tool calls, as far as each is certain.

One machine serves every family whose output is ``[<think> reasoning </think>] content`` with
tool calls as JSON between two markers. Reasoning is the first region only; a tool call that
opens inside it ends it, unless a closing marker follows later. White space around reasoning and
content is dropped. A block that is no valid call stays in the content as it was written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from any_agent.chat.output.stops import Piece
from any_agent.chat.output.toolcalls import CallIds, openai_call
from any_agent.types import Message

TEXT = "text"
THINK_OPEN = "think_open"
THINK_CLOSE = "think_close"
TOOL_OPEN = "tool_open"
TOOL_CLOSE = "tool_close"


@dataclass(slots=True)
class ParsedMessage:
    """One output, taken apart; ``tool_calls`` in OpenAI's form with ``call_<hex>`` ids."""

    content: str
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    def to_message(self) -> Message:
        """The assistant message in OpenAI's form; content is None beside tool calls alone."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["content"] = self.content or None
            message["tool_calls"] = self.tool_calls
        return message


@dataclass(slots=True)
class MessageDelta:
    """One step of a stream in OpenAI's form; exactly one of the fields is set."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class Trimmed:
    """Text without the white space at its two ends, released as soon as it is inside."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._space: list[str] = []

    def push(self, text: str) -> str:
        if not self._parts:
            text = text.lstrip()
        body = text.rstrip()
        if not body:
            if text:
                self._space.append(text)
            return ""
        visible = "".join(self._space) + body
        self._space = [text[len(body) :]]
        self._parts.append(visible)
        return visible

    def text(self) -> str:
        return "".join(self._parts)


class Deltas:
    """The stream's steps; neighbours of one kind become one."""

    def __init__(self) -> None:
        self._out: list[MessageDelta] = []

    def content(self, text: str) -> None:
        last = self._out[-1] if self._out else None
        if text and last is not None and last.content is not None:
            last.content += text
        elif text:
            self._out.append(MessageDelta(content=text))

    def reasoning(self, text: str) -> None:
        last = self._out[-1] if self._out else None
        if text and last is not None and last.reasoning_content is not None:
            last.reasoning_content += text
        elif text:
            self._out.append(MessageDelta(reasoning_content=text))

    def call(self, index: int, call: dict[str, Any]) -> None:
        self._out.append(MessageDelta(tool_calls=[{"index": index, **call}]))

    def take(self) -> list[MessageDelta]:
        out, self._out = self._out, []
        return out


class _State(Enum):
    START = auto()
    REASONING = auto()
    CALL_IN_REASONING = auto()
    CONTENT = auto()
    CALL = auto()


class OutputMachine:
    """Takes pieces in order; ``deltas`` holds what became certain."""

    def __init__(
        self,
        *,
        reasoning_open: bool,
        read_call: Callable[[str], tuple[str, str] | None] | None,
        call_ids: CallIds,
    ) -> None:
        """``reasoning_open``: the prompt ends inside reasoning. ``read_call`` None: no calls."""
        self._state = _State.REASONING if reasoning_open else _State.START
        self._read_call = read_call
        self._call_ids = call_ids
        self._reasoning = Trimmed()
        self._content = Trimmed()
        self._calls: list[dict[str, Any]] = []
        self._block: list[Piece] = []
        self.deltas = Deltas()

    @property
    def may_meet_reasoning(self) -> bool:
        """Whether a reasoning marker would still mean something here."""
        return self._state not in (_State.CONTENT, _State.CALL)

    def push(self, text: str, kind: str = TEXT) -> None:
        if self._read_call is None and kind in (TOOL_OPEN, TOOL_CLOSE):
            kind = TEXT
        match self._state:
            case _State.START:
                self._at_start(text, kind)
            case _State.REASONING:
                self._in_reasoning(text, kind)
            case _State.CALL_IN_REASONING:
                self._in_doubtful_call(text, kind)
            case _State.CONTENT:
                self._in_content(text, kind)
            case _State.CALL:
                self._in_call(text, kind)

    def finish(self) -> ParsedMessage:
        if self._state is _State.CALL_IN_REASONING:
            # No closing marker came, so the call did end the reasoning.
            block, self._block = self._block, []
            self._state = _State.CONTENT
            for text, kind in block:
                self.push(text, kind)
        if self._state is _State.CALL:
            self._release_block()
        return ParsedMessage(
            self._content.text(), self._reasoning.text() or None, list(self._calls)
        )

    def _at_start(self, text: str, kind: str) -> None:
        if kind == THINK_OPEN:
            self._state = _State.REASONING
        elif kind != TEXT or text.strip():
            self._state = _State.CONTENT
            self._in_content(text, kind)

    def _in_reasoning(self, text: str, kind: str) -> None:
        if kind == THINK_CLOSE:
            self._state = _State.CONTENT
        elif kind == TOOL_OPEN:
            self._state = _State.CALL_IN_REASONING
            self._block = [(text, kind)]
        elif kind != THINK_OPEN:
            self.deltas.reasoning(self._reasoning.push(text))

    def _in_doubtful_call(self, text: str, kind: str) -> None:
        if kind != THINK_CLOSE:
            self._block.append((text, kind))
            return
        drafted = "".join(text for text, kind in self._block if kind != THINK_OPEN)
        self.deltas.reasoning(self._reasoning.push(drafted))
        self._block = []
        self._state = _State.CONTENT

    def _in_content(self, text: str, kind: str) -> None:
        if kind == TOOL_OPEN:
            self._state = _State.CALL
            self._block = [(text, kind)]
        else:
            self.deltas.content(self._content.push(text))

    def _in_call(self, text: str, kind: str) -> None:
        self._block.append((text, kind))
        if kind != TOOL_CLOSE:
            return
        inner = "".join(text for text, _ in self._block[1:-1])
        call = self._read_call(inner) if self._read_call else None
        if call is None:
            self._release_block()
            return
        index = len(self._calls)
        entry = openai_call(self._call_ids.make(index, inner), *call)
        self._calls.append(entry)
        self.deltas.call(index, entry)
        self._block = []
        self._state = _State.CONTENT

    def _release_block(self) -> None:
        """A block that is no call is content."""
        block, self._block = self._block, []
        self._state = _State.CONTENT
        self.deltas.content(self._content.push("".join(text for text, _ in block)))
