"""Llama 3: an answer that is as a whole a call, ``{"name": ..., "parameters": {...}}``, or text.

``<|python_tag|>`` may stand before a call. Several are separated by white space or semicolons.
A JSON answer that happens to have a name is no call unless a tool has that name or there are
parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

from any_agent.chat.output.grammar import THINK, CallSyntax, OutputGrammar, declared_names, marked
from any_agent.chat.output.json_call_reader import JsonCallReader
from any_agent.chat.output.markers import TOOL_OPEN
from any_agent.chat.output.message import MessageBuilder
from any_agent.chat.output.state_machine import CallReader, Status
from any_agent.types import Tool


class LlamaReader(CallReader):
    """Reads one call."""

    wanted = frozenset({TOOL_OPEN})

    def __init__(self, builder: MessageBuilder, tools: Sequence[Tool]) -> None:
        super().__init__(builder, tools)
        self._object = JsonCallReader(builder, declared_names(tools))

    def push(self, text: str, kind: str) -> Status:
        read = self._object.feed(text)
        self.opened = self._object.opened
        if self._object.failed:
            return Status.REFUSED
        if not self._object.complete:
            return Status.READING
        self._builder.close_call()
        self.rest = text[read:]
        return Status.DONE

    def end(self) -> None:
        self._object.end()


GRAMMAR = OutputGrammar(
    marks={**THINK, "<|python_tag|>": TOOL_OPEN},
    new_machine=marked(LlamaReader, bare=True),
    calls=CallSyntax('{"name": "', '", "parameters":', "}"),
)
