"""gpt-oss: an output of several messages, each with a header that routes its text.

``<|start|>assistant<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}``,
ended by ``<|end|>``, ``<|call|>`` or ``<|return|>``. The channel ``analysis`` is reasoning,
``final`` and ``commentary`` are content, and a message to a function is a call.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from any_agent.chat.output.grammar import CallSyntax, OutputGrammar, declared_names
from any_agent.chat.output.markers import CALLS_OPEN, SEPARATOR, TOOL_CLOSE, TOOL_OPEN, VALUE_OPEN
from any_agent.chat.output.message import MessageBuilder, WhitespaceTrimmer
from any_agent.types import Tool

START = CALLS_OPEN
CHANNEL = TOOL_OPEN
CONSTRAIN = SEPARATOR
MESSAGE = VALUE_OPEN
END = TOOL_CLOSE

_MAX_HEADER = 1024
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*([^\s<]+)")
_FUNCTIONS = "functions."


class HarmonyMachine:
    """Reads such messages; text outside of them, or a header that never ends, is content."""

    wanted = frozenset({START, CHANNEL, CONSTRAIN, MESSAGE, END})

    def __init__(
        self, builder: MessageBuilder, tools: Sequence[Tool], reasoning_open: bool
    ) -> None:
        self._builder = builder
        self._has_tools = bool(tools)
        self._declared = declared_names(tools)
        self._header: list[str] | None = None
        self._header_length = 0
        self._given = 0
        """The number of the header's parts that stand in the prompt."""
        self._channel: str | None = None
        self._arguments: WhitespaceTrimmer | None = None

    def prompt(self, pieces: Sequence[tuple[str, str]]) -> None:
        """Read the header that the prompt's end has opened, and perhaps closed."""
        for text, kind in pieces:
            self.push(text, kind)
        self._given = len(self._header or ())

    def push(self, text: str, kind: str) -> None:
        if kind == START:
            self._end_message()
            self._header, self._header_length = [text], len(text)
        elif self._header is not None:
            self._in_header(self._header, text, kind)
        elif kind == END:
            self._end_message()
        elif kind == CHANNEL and self._channel is None:
            self._header, self._header_length = [text], len(text)
        elif self._arguments is not None:
            self._builder.arguments(self._arguments.push(text))
        elif self._channel == "analysis":
            self._builder.reasoning(text)
        else:
            self._builder.content(text)

    def finish(self) -> None:
        self._release()

    def _in_header(self, header: list[str], text: str, kind: str) -> None:
        self._header_length += len(text)
        if kind == MESSAGE:
            self._begin_message("".join(header))
        elif kind == END:
            self._release()
        else:
            header.append(text)
            if self._header_length > _MAX_HEADER:
                self._release()

    def _begin_message(self, header: str) -> None:
        self._header, self._given = None, 0
        channel = _CHANNEL.search(header)
        self._channel = channel[1] if channel else "final"
        recipient = _RECIPIENT.search(header)
        name = self._tool(recipient[1]) if recipient and self._has_tools else None
        if name:
            self._arguments = WhitespaceTrimmer()
            self._builder.open_call(name)

    def _tool(self, recipient: str) -> str | None:
        if recipient.startswith(_FUNCTIONS):
            return recipient[len(_FUNCTIONS) :]
        return recipient if recipient in self._declared else None

    def _end_message(self) -> None:
        if self._arguments is not None:
            self._builder.close_call()
        self._arguments = self._channel = None
        self._release()

    def _release(self) -> None:
        if self._header is not None:
            written = "".join(self._header[self._given :])
            self._header, self._given = None, 0
            self._builder.content(written)


GRAMMAR = OutputGrammar(
    marks={
        "<|start|>": START,
        "<|channel|>": CHANNEL,
        "<|constrain|>": CONSTRAIN,
        "<|message|>": MESSAGE,
        "<|end|>": END,
        "<|call|>": END,
    },
    new_machine=HarmonyMachine,
    calls=CallSyntax(
        "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "", separator=None
    ),
    one_call_stop="<|call|>",
    leave_reasoning="<|end|><|start|>assistant",
    text_opening="<|channel|>final<|message|>",
    turn_start="<|start|>",
)
