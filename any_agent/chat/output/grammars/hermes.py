"""Qwen3, Hermes: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

from __future__ import annotations

from collections.abc import Sequence

from any_agent.chat.output.grammar import THINK, CallSyntax, OutputGrammar, marked
from any_agent.chat.output.json_call_reader import JsonCallReader
from any_agent.chat.output.markers import TOOL_CLOSE, TOOL_OPEN
from any_agent.chat.output.message import MessageBuilder
from any_agent.chat.output.state_machine import CallReader, Status
from any_agent.types import Tool


class HermesReader(CallReader):
    """Reads one call; text between the closing brace and the closing marker is ignored."""

    wanted = frozenset({TOOL_CLOSE})

    def __init__(self, builder: MessageBuilder, tools: Sequence[Tool]) -> None:
        super().__init__(builder, tools)
        self._object = JsonCallReader(builder)

    def push(self, text: str, kind: str) -> Status:
        if kind != TOOL_CLOSE:
            self._object.feed(text)
            self.opened = self._object.opened
            return Status.REFUSED if self._object.failed else Status.READING
        if not self.opened:
            return Status.REFUSED
        self.end()
        self._builder.close_call()
        return Status.DONE

    def end(self) -> None:
        self._object.end()


GRAMMAR = OutputGrammar(
    marks={**THINK, "<tool_call>": TOOL_OPEN, "</tool_call>": TOOL_CLOSE},
    new_machine=marked(HermesReader),
    # The space before the arguments belongs to their first token, so the model writes it.
    calls=CallSyntax('<tool_call>\n{"name": "', '", "arguments":', "}\n</tool_call>"),
    one_call_stop="</tool_call>",
)
