"""Kimi K2: a section of calls, each an id that contains the name, and JSON.

``<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>``
"""

from __future__ import annotations

from collections.abc import Sequence

from any_agent.chat.output.grammar import THINK, CallSyntax, OutputGrammar, marked
from any_agent.chat.output.markers import CALLS_CLOSE, CALLS_OPEN, SEPARATOR, TOOL_CLOSE, TOOL_OPEN
from any_agent.chat.output.message import MessageBuilder, WhitespaceTrimmer
from any_agent.chat.output.state_machine import CallReader, Status
from any_agent.types import Tool

_MAX_ID = 256


class KimiReader(CallReader):
    """Reads one call; everything after the separator is arguments."""

    wanted = frozenset({SEPARATOR, TOOL_CLOSE})

    def __init__(self, builder: MessageBuilder, tools: Sequence[Tool]) -> None:
        super().__init__(builder, tools)
        self._id = ""
        self._arguments = WhitespaceTrimmer()

    def push(self, text: str, kind: str) -> Status:
        if kind == TOOL_CLOSE:
            if self.opened:
                self._builder.close_call()
            return Status.DONE if self.opened else Status.REFUSED
        if self.opened:
            self._builder.arguments(self._arguments.push(text))
            return Status.READING
        if kind != SEPARATOR:
            self._id += text
            return Status.REFUSED if len(self._id) > _MAX_ID else Status.READING
        before, dot, after = self._id.strip().partition(":")[0].partition(".")
        name = after if dot else before
        if not name:
            return Status.REFUSED
        self.opened = True
        self._builder.open_call(name)
        return Status.READING


GRAMMAR = OutputGrammar(
    marks={
        **THINK,
        "<|tool_calls_section_begin|>": CALLS_OPEN,
        "<|tool_calls_section_end|>": CALLS_CLOSE,
        "<|tool_call_begin|>": TOOL_OPEN,
        "<|tool_call_end|>": TOOL_CLOSE,
        "<|tool_call_argument_begin|>": SEPARATOR,
    },
    new_machine=marked(KimiReader),
    calls=CallSyntax(
        "<|tool_call_begin|>functions.",
        ":0<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        opening="<|tool_calls_section_begin|>",
        closing="<|tool_calls_section_end|>",
        separator=None,
    ),
    one_call_stop="<|tool_call_end|>",
)
