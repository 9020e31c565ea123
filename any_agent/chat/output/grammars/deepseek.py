"""DeepSeek V3 and R1: a section of calls, each a name and a fenced block of JSON.

``<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>name``, a line break, the block,
``<｜tool▁call▁end｜>``, ..., ``<｜tool▁calls▁end｜>``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from any_agent.chat.output.grammar import THINK, CallSyntax, OutputGrammar, marked
from any_agent.chat.output.json_stream import ValueScanner
from any_agent.chat.output.markers import CALLS_CLOSE, CALLS_OPEN, SEPARATOR, TOOL_CLOSE, TOOL_OPEN
from any_agent.chat.output.message import MessageBuilder, WhitespaceTrimmer
from any_agent.chat.output.state_machine import CallReader, ReasoningState, Status
from any_agent.types import Tool

_MAX_NAME = 256
_NAME = re.compile(r"\s*([^\n{`]*)[\n{`]")
_FENCE = "```"
_FENCE_LINE = re.compile(r"```(?:json)?[ \t]*\n?")


class DeepSeekReader(CallReader):
    """Reads one call; text after the arguments' value is ignored."""

    wanted = frozenset({SEPARATOR, TOOL_CLOSE})

    def __init__(self, builder: MessageBuilder, tools: Sequence[Tool]) -> None:
        super().__init__(builder, tools)
        self._text = ""
        self._refused = False
        self._scanner = ValueScanner()
        self._raw = WhitespaceTrimmer(" \t\r\n`")
        self._step: Callable[[str], None] = self._in_type

    def push(self, text: str, kind: str) -> Status:
        if kind == TOOL_CLOSE:
            if not self.opened:
                self._open_call(self._text)
            if self._refused:
                return Status.REFUSED
            self.end()
            self._builder.close_call()
            return Status.DONE
        if kind == SEPARATOR and self._step == self._in_type:
            self._step = self._in_name
        else:
            self._step(text)
        return Status.REFUSED if self._refused else Status.READING

    def end(self) -> None:
        if self._step == self._before_value and self._text:
            self._builder.arguments(self._raw.push(self._text))

    # -- steps -------------------------------------------------------------------------------------

    def _in_type(self, text: str) -> None:
        """Ignore the type, which is always ``function``."""

    def _in_name(self, text: str) -> None:
        self._text += text
        match = _NAME.match(self._text)
        if (match.end() - 1 if match else len(self._text)) > _MAX_NAME:
            self._refused = True
        if match is None or self._refused:
            return
        rest = self._text[match.end(1) :]
        self._text = ""
        self._open_call(match[1])
        if not self._refused:
            self._step = self._before_value
            self._before_value(rest)

    def _before_value(self, text: str) -> None:
        """Skip white space and the fence's first line."""
        self._text = (self._text + text).lstrip()
        if _FENCE.startswith(self._text) or (
            self._text.startswith(_FENCE) and f"{_FENCE}json\n".startswith(self._text)
        ):
            return
        fence = _FENCE_LINE.match(self._text)
        value = self._text[fence.end() :].lstrip() if fence else self._text
        if not value:
            return
        self._text = ""
        self._step = self._in_value if value[0] in "{[" else self._as_written
        self._step(value)

    def _in_value(self, text: str) -> None:
        end = self._scanner.feed(text)
        broken_at = self._scanner.broken_at
        if broken_at is not None:
            self._builder.arguments(text[:broken_at])
            self._step = self._as_written
            self._as_written(text[broken_at:])
        elif end < 0:
            self._builder.arguments(text)
        else:
            self._builder.arguments(text[:end])
            self._step = self._in_type

    def _as_written(self, text: str) -> None:
        self._builder.arguments(self._raw.push(text))

    def _open_call(self, text: str) -> None:
        name = text.strip()
        self._refused = not name or self._step == self._in_type
        if not self._refused:
            self.opened = True
            self._builder.open_call(name)


GRAMMAR = OutputGrammar(
    marks={
        **THINK,
        "<｜tool▁calls▁begin｜>": CALLS_OPEN,
        "<｜tool▁calls▁end｜>": CALLS_CLOSE,
        "<｜tool▁call▁begin｜>": TOOL_OPEN,
        "<｜tool▁call▁end｜>": TOOL_CLOSE,
        "<｜tool▁sep｜>": SEPARATOR,
    },
    new_machine=marked(DeepSeekReader, in_reasoning=ReasoningState.DRAFT),
    calls=CallSyntax(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        opening="<｜tool▁calls▁begin｜>",
        closing="<｜tool▁calls▁end｜>",
    ),
    one_call_stop="<｜tool▁call▁end｜>",
)
