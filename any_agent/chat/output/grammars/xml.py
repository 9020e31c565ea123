"""Qwen3-Coder, Qwen3.5 and MiniMax M2: calls whose parameters stand between tags."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from any_agent.chat.output.grammar import THINK, CallSyntax, OutputGrammar, marked
from any_agent.chat.output.markers import TOOL_CLOSE, TOOL_OPEN, MarkerFinder
from any_agent.chat.output.message import MessageBuilder
from any_agent.chat.output.state_machine import CallReader, Status
from any_agent.chat.output.tool_arguments import ArgumentsWriter
from any_agent.types import Tool

_MAX_NAME = 256


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags of one family."""

    function: str
    function_end: str
    parameter: str
    parameter_end: str
    quote: str
    """The text that closes the name in an opening tag."""


QWEN = Tags("<function=", "</function>", "<parameter=", "</parameter>", ">")
MINIMAX = Tags('<invoke name="', "</invoke>", '<parameter name="', "</parameter>", '">')


class XmlReader(CallReader):
    """Reads one block, which may hold several calls.

    One line break at each end of a value does not belong to it. Text between parameters and after
    calls is ignored; a value goes on until its closing tag, or until the block ends.
    """

    wanted = frozenset({TOOL_CLOSE})

    def __init__(self, tags: Tags, builder: MessageBuilder, tools: Sequence[Tool]) -> None:
        super().__init__(builder, tools)
        self._tags = tags
        self._text = ""
        """Unread text: an incomplete tag, or a text that may begin one."""
        self._functions = MarkerFinder([tags.function])
        self._parameters = MarkerFinder([tags.parameter, tags.function_end])
        self._value_ends = MarkerFinder(["\n" + tags.parameter_end, tags.parameter_end])
        self._refused = False
        self._writer: ArgumentsWriter | None = None
        self._step: Callable[[], bool] = self._before_function

    def push(self, text: str, kind: str) -> Status:
        if kind == TOOL_CLOSE:
            if self.opened:
                self._end(complete=True)
            return Status.DONE if self.opened else Status.REFUSED
        self._text += text
        while self._step():
            pass
        return Status.REFUSED if self._refused else Status.READING

    def end(self) -> None:
        self._end(complete=False)

    def _end(self, *, complete: bool) -> None:
        if self._step in (self._at_value, self._in_value) and self._writer is not None:
            self._writer.more(self._text)
            self._writer.cut()
        elif complete and self._writer is not None:
            self._writer.close()
        self._writer = None

    # -- steps: each consumes what it can of the text, and returns True if the next one can go on --

    def _before_function(self) -> bool:
        if self.opened:
            return self._skip_to(self._functions) is not None and self._go(self._in_name)
        self._text = self._text.lstrip()
        if self._text.startswith(self._tags.function):
            self._text = self._text[len(self._tags.function) :]
            return self._go(self._in_name)
        self._refused = not self._tags.function.startswith(self._text)
        return False

    def _in_name(self) -> bool:
        name, readable = self._until_quote()
        if name is None:
            if not readable:
                self._refused = not self.opened
                return self.opened and self._go(self._before_function)
            return False
        self.opened = True
        self._builder.open_call(name)
        self._writer = ArgumentsWriter(self._builder, name, self._tools)
        return self._go(self._before_parameter)

    def _before_parameter(self) -> bool:
        mark = self._skip_to(self._parameters)
        if mark is None:
            return False
        if mark == self._tags.parameter:
            return self._go(self._in_key)
        assert self._writer is not None
        self._writer.close()
        self._writer = None
        return self._go(self._before_function)

    def _in_key(self) -> bool:
        key, readable = self._until_quote()
        if key is None:
            return not readable and self._go(self._before_parameter)
        assert self._writer is not None
        self._writer.begin(key)
        return self._go(self._at_value)

    def _at_value(self) -> bool:
        if not self._text:
            return False
        self._text = self._text.removeprefix("\n")
        return self._go(self._in_value)

    def _in_value(self) -> bool:
        assert self._writer is not None
        found = self._value_ends.find(self._text)
        if found is None:
            at = len(self._text) - self._value_ends.doubtful(self._text)
            self._writer.more(self._text[:at])
            self._text = self._text[at:]
            return False
        self._writer.more(self._text[: found[0]])
        self._writer.end()
        self._text = self._text[found[0] + len(found[1]) :]
        return self._go(self._before_parameter)

    def _go(self, step: Callable[[], bool]) -> bool:
        self._step = step
        return True

    def _skip_to(self, marks: MarkerFinder) -> str | None:
        """Drop the text up to the first mark and the mark; return the mark, if any."""
        found = marks.find(self._text)
        if found is None:
            self._text = self._text[len(self._text) - marks.doubtful(self._text) :]
            return None
        self._text = self._text[found[0] + len(found[1]) :]
        return found[1]

    def _until_quote(self) -> tuple[str | None, bool]:
        """Return a tag's name, and True if there is one or the text can still become one."""
        end = self._text.find(self._tags.quote)
        name = self._text[:end] if end >= 0 else self._text
        # The text may end with a part of the closing quote, which is not the name's.
        longest = _MAX_NAME if end >= 0 else _MAX_NAME + len(self._tags.quote) - 1
        readable = len(name) <= longest and "\n" not in name
        if not readable or end < 0:
            return None, readable
        self._text = self._text[end + len(self._tags.quote) :]
        return name.strip() or None, bool(name.strip())


def _grammar(tags: Tags, opening: str, closing: str) -> OutputGrammar:
    return OutputGrammar(
        marks={**THINK, opening: TOOL_OPEN, closing: TOOL_CLOSE},
        new_machine=marked(lambda builder, tools: XmlReader(tags, builder, tools)),
        calls=CallSyntax(
            f"{opening}\n{tags.function}",
            f"{tags.quote}\n",
            f"{tags.function_end}\n{closing}",
            parameter=(tags.parameter, f"{tags.quote}\n", f"{tags.parameter_end}\n"),
        ),
        one_call_stop=closing,
    )


GRAMMAR = _grammar(QWEN, "<tool_call>", "</tool_call>")
MINIMAX_GRAMMAR = _grammar(MINIMAX, "<minimax:tool_call>", "</minimax:tool_call>")
