"""GLM: ``<tool_call>name <arg_key>k</arg_key> <arg_value>v</arg_value> ... </tool_call>``."""

from __future__ import annotations

import re
from collections.abc import Sequence

from any_agent.chat.output.grammar import THINK, CallSyntax, OutputGrammar, marked
from any_agent.chat.output.markers import (
    KEY_CLOSE,
    KEY_OPEN,
    TEXT,
    TOOL_CLOSE,
    TOOL_OPEN,
    VALUE_CLOSE,
    VALUE_OPEN,
)
from any_agent.chat.output.message import MessageBuilder
from any_agent.chat.output.state_machine import CallReader, ReasoningState, Status
from any_agent.chat.output.tool_arguments import ArgumentsWriter
from any_agent.types import Tool

_MAX_NAME = 256
_NO_NAME = re.compile(r"\S\s+\S")


class GlmReader(CallReader):
    """Reads one call; its name ends at a line break or a marker, and has no white space in it.

    Text that is neither name, key nor value is ignored.
    """

    wanted = frozenset({TOOL_CLOSE, KEY_OPEN, KEY_CLOSE, VALUE_OPEN, VALUE_CLOSE})

    def __init__(self, builder: MessageBuilder, tools: Sequence[Tool]) -> None:
        super().__init__(builder, tools)
        self._name = ""
        self._key: list[str] | None = None
        self._in_key = False
        self._in_value = False
        self._writer: ArgumentsWriter | None = None

    def push(self, text: str, kind: str) -> Status:
        if self._writer is None:
            return self._push_name(text, kind)
        if kind == TOOL_CLOSE:
            if self._in_value:
                self._writer.cut()
            else:
                self._writer.close()
            return Status.DONE
        if self._in_value:
            if kind == VALUE_CLOSE:
                self._in_value = False
                self._writer.end()
            else:
                self._writer.more(text)
        elif kind == KEY_OPEN:
            self._key, self._in_key = [], True
        elif kind == KEY_CLOSE:
            self._in_key = False
        elif kind == VALUE_OPEN and self._key is not None:
            self._writer.begin("".join(self._key).strip())
            self._key, self._in_key, self._in_value = None, False, True
        elif self._in_key and self._key is not None:
            self._key.append(text)
        return Status.READING

    def end(self) -> None:
        if self._in_value and self._writer is not None:
            self._writer.cut()

    def _push_name(self, text: str, kind: str) -> Status:
        if kind == TEXT:
            self._name, line_break, _ = (self._name + text).lstrip().partition("\n")
            if len(self._name) > _MAX_NAME or _NO_NAME.search(self._name):
                return Status.REFUSED
            if not line_break:
                return Status.READING
        name = self._name.strip()
        if not name:
            return Status.REFUSED
        self.opened = True
        self._builder.open_call(name)
        self._writer = ArgumentsWriter(self._builder, name, self._tools)
        return Status.READING if kind == TEXT else self.push(text, kind)


GRAMMAR = OutputGrammar(
    marks={
        **THINK,
        "<tool_call>": TOOL_OPEN,
        "</tool_call>": TOOL_CLOSE,
        "<arg_key>": KEY_OPEN,
        "</arg_key>": KEY_CLOSE,
        "<arg_value>": VALUE_OPEN,
        "</arg_value>": VALUE_CLOSE,
    },
    new_machine=marked(GlmReader, in_reasoning=ReasoningState.CALL),
    calls=CallSyntax(
        "<tool_call>",
        "\n",
        "</tool_call>",
        parameter=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
    one_call_stop="</tool_call>",
)
