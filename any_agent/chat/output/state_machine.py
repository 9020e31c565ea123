"""The state machine that divides raw output into reasoning, content and tool calls.

One machine serves every family whose output is ``[<think> reasoning </think>] content`` with calls
between markers (or, in the families without markers, as bare JSON). Reasoning is the first region
only. White space around reasoning is dropped, and around content what the template puts there: line
breaks after reasoning, and white space before calls. Text that opens like a call and never names a
tool stays in the content as it was written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Protocol

from any_agent.chat.output.markers import (
    ALL_KINDS,
    CALLS_CLOSE,
    CALLS_OPEN,
    TEXT,
    THINK_CLOSE,
    THINK_OPEN,
    TOOL_OPEN,
    Piece,
)
from any_agent.chat.output.message import MessageBuilder
from any_agent.types import Tool


class Status(Enum):
    """The state of a :class:`CallReader` after a piece."""

    READING = auto()
    DONE = auto()
    """The block ends with this piece."""
    REFUSED = auto()
    """This is no call, and the piece was not consumed: nothing of it is in the message."""


class CallReader:
    """Reads the text after a call's opening into the builder."""

    wanted: frozenset[str]
    """The kinds of markers that matter to it, or later in the same text; others are text."""
    rest = ""
    """The part of the last piece after the call's end."""

    def __init__(self, builder: MessageBuilder, tools: Sequence[Tool]) -> None:
        self._builder = builder
        self._tools = tools
        self.opened = False
        """True once a tool was named; from then on it is a call."""

    def push(self, text: str, kind: str) -> Status:
        raise NotImplementedError

    def end(self) -> None:
        """End the reading: the output ends inside the call."""


class StateMachine(Protocol):
    """Takes pieces in order, and passes their content to the builder."""

    @property
    def wanted(self) -> frozenset[str]:
        """The kinds of markers that matter now, or after some more text."""

    def push(self, text: str, kind: str) -> None: ...

    def finish(self) -> None: ...


class TextMachine:
    """The machine of an output without structure: all of it is content."""

    wanted: frozenset[str] = frozenset()

    def __init__(self, builder: MessageBuilder) -> None:
        self._builder = builder

    def push(self, text: str, kind: str) -> None:
        self._builder.content(text)

    def finish(self) -> None:
        """Do nothing: no text waits here."""


class ReasoningState(Enum):
    """The meaning of a call's opening inside open reasoning."""

    DRAFT = auto()
    """The opening is a part of the reasoning."""
    DOUBT = auto()
    """It ends the reasoning, unless a closing marker follows; until then the text waits."""
    CALL = auto()
    """It ends the reasoning."""


class _State(Enum):
    START = auto()
    REASONING = auto()
    DOUBT = auto()
    """In reasoning, after a call's opening."""
    BARE = auto()
    """At a place where a call without markers may begin."""
    CONTENT = auto()
    SECTION = auto()
    """Inside a section of calls, between two of them."""
    CALL = auto()


_OPENINGS = frozenset({TOOL_OPEN, CALLS_OPEN})
_SEPARATORS = " \t\r\n;"


class OutputMachine:
    """The machine of the families with markers, and of those with calls as bare JSON."""

    def __init__(
        self,
        builder: MessageBuilder,
        new_reader: Callable[[], CallReader] | None,
        *,
        reasoning_open: bool,
        in_reasoning: ReasoningState = ReasoningState.DOUBT,
        bare: bool = False,
    ) -> None:
        """``new_reader`` None: the request has no tools, so nothing is a call.

        ``reasoning_open``: the prompt ends inside reasoning. ``bare``: calls need no marker.
        """
        self._builder = builder
        self._new_reader = new_reader
        self._openings = _OPENINGS if new_reader else frozenset()
        self._in_reasoning_call = in_reasoning
        self._after_reasoning = _State.BARE if bare and new_reader else _State.CONTENT
        self._reader: CallReader | None = None
        self._doubt: list[Piece] = []
        self._pending: list[str] = []
        """Text that becomes content if it turns out to be no call."""
        self._in_section = False
        self._had_call = False
        self._enter(_State.REASONING if reasoning_open else _State.START)

    def push(self, text: str, kind: str) -> None:
        seen = kind if kind in self.wanted else TEXT
        match self._state:
            case _State.CONTENT:
                self._in_content(text, seen)
            case _State.REASONING:
                self._in_reasoning(text, seen)
            case _State.CALL:
                self._in_call(text, kind)
            case _State.START:
                self._at_start(text, seen)
            case _State.BARE:
                self._at_bare(text, seen)
            case _State.SECTION:
                self._among_calls(text, seen)
            case _State.DOUBT:
                self._in_doubt(text, kind)

    def finish(self) -> None:
        if self._state is _State.DOUBT:
            # No closing marker came, so the call did end the reasoning.
            pieces, self._doubt = self._doubt, []
            self._enter(_State.CONTENT)
            for text, kind in pieces:
                self.push(text, kind)
        if self._state is _State.CALL and self._reader is not None and self._reader.opened:
            self._reader.end()
        elif not (self._state is _State.BARE and self._had_call):
            self._release()

    def _enter(self, state: _State) -> None:
        self._state = state
        match state:
            case _State.START:
                self.wanted = self._openings | {THINK_OPEN}
            case _State.REASONING:
                self.wanted = frozenset({THINK_OPEN, THINK_CLOSE})
                if self._in_reasoning_call is not ReasoningState.DRAFT:
                    self.wanted |= self._openings
            case _State.DOUBT:
                self.wanted = ALL_KINDS
            case _State.SECTION:
                self.wanted = self._openings | {CALLS_CLOSE}
            case _State.CALL if self._reader is not None:
                # Until a tool is named, text can turn this into content.
                self.wanted = self._reader.wanted | self._openings
            case _:
                self.wanted = self._openings

    def _at_start(self, text: str, kind: str) -> None:
        if kind == THINK_OPEN:
            self._pending = []
            self._enter(_State.REASONING)
        elif kind == TEXT and not text.strip():
            self._pending.append(text)
        else:
            before, self._pending = "".join(self._pending), []
            self._enter(self._after_reasoning)
            if before:
                self.push(before, TEXT)
            self.push(text, kind)

    def _in_reasoning(self, text: str, kind: str) -> None:
        if kind == THINK_CLOSE:
            self._builder.end_reasoning()
            self._enter(self._after_reasoning)
        elif kind in _OPENINGS and self._in_reasoning_call is ReasoningState.DOUBT:
            self._enter(_State.DOUBT)
            self._doubt = [(text, kind)]
        elif kind in _OPENINGS:
            self._enter(_State.CONTENT)
            self.push(text, kind)
        elif kind != THINK_OPEN:
            self._builder.reasoning(text)

    def _in_doubt(self, text: str, kind: str) -> None:
        if kind != THINK_CLOSE:
            self._doubt.append((text, kind))
            return
        drafted = "".join(text for text, kind in self._doubt if kind != THINK_OPEN)
        self._builder.reasoning(drafted)
        self._builder.end_reasoning()
        self._doubt = []
        self._enter(self._after_reasoning)

    def _in_content(self, text: str, kind: str) -> None:
        if kind == TEXT:
            self._builder.content(text)
        elif kind == CALLS_OPEN:
            self._pending = [text]
            self._in_section = True
            self._had_call = False
            self._enter(_State.SECTION)
        else:
            self._pending = [text]
            self._open()

    def _at_bare(self, text: str, kind: str) -> None:
        """Handle a piece where nothing came yet, or nothing but calls."""
        body = text.lstrip(_SEPARATORS if self._had_call else None)
        if kind != TEXT:
            self._pending.append(text)
            self._open()
        elif not body:
            self._pending.append(text)
        elif body[0] == "{":
            self._pending.append(text[: len(text) - len(body)])
            self._open()
            self.push(body, TEXT)
        else:
            self._release()
            self.push(text, TEXT)

    def _among_calls(self, text: str, kind: str) -> None:
        if kind == TOOL_OPEN:
            self._pending.append(text)
            self._open()
        elif kind == CALLS_CLOSE and self._had_call:
            self._pending = []
            self._in_section = False
            self._enter(_State.CONTENT)
        elif kind == TEXT and not text.strip():
            self._pending.append(text)
        else:
            self._release()
            self.push(text, kind)

    def _open(self) -> None:
        assert self._new_reader is not None
        self._reader = self._new_reader()
        self._enter(_State.CALL)

    def _in_call(self, text: str, kind: str) -> None:
        reader = self._reader
        assert reader is not None
        status = reader.push(text, kind if kind in reader.wanted else TEXT)
        if status is Status.REFUSED:
            self._release()
            self.push(text, kind)
            return
        if reader.opened:
            self._pending = []
            self._had_call = True
            self.wanted = reader.wanted
        else:
            self._pending.append(text)
        if status is Status.DONE:
            after = _State.SECTION if self._in_section else self._after_reasoning
            self._reader = None
            self._enter(after)
            if reader.rest:
                self.push(reader.rest, TEXT)

    def _release(self) -> None:
        pending, self._pending = self._pending, []
        self._reader = None
        self._in_section = False
        self._enter(_State.CONTENT)
        if pending:
            self._builder.content("".join(pending))
