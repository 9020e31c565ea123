"""What a family's outputs look like."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from any_agent.chat.output.json_stream import quoted
from any_agent.chat.output.markers import THINK_CLOSE, THINK_OPEN
from any_agent.chat.output.message_builder import MessageBuilder
from any_agent.chat.output.state_machine import (
    CallReader,
    OutputMachine,
    ReasoningState,
    StateMachine,
)
from any_agent.types import Tool

THINK: Mapping[str, str] = {"<think>": THINK_OPEN, "</think>": THINK_CLOSE}

NewMachine = Callable[[MessageBuilder, Sequence[Tool], bool], StateMachine]
"""Of the builder, the request's tools, and whether the prompt ends inside reasoning."""


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """The text that a family's models write around a call's name and arguments."""

    begin: str
    """Up to the name."""
    between: str
    """The text between the name and the arguments."""
    end: str
    opening: str = ""
    """Before the first call, ``closing`` after the last."""
    closing: str = ""
    separator: str | None = "\n"
    """Between two calls; None: one at a time."""
    parameter: tuple[str, str, str] | None = None
    """Around each argument's name and value; None: the arguments are a JSON object."""

    def open(self, name: str | None) -> str:
        """The text that makes the model call this tool (any one, if None); where it may write
        on."""
        begun = self.opening + self.begin
        if name is None:
            return begun
        # A name in quotes is a JSON string.
        return begun + (quoted(name)[1:-1] if begun.endswith('"name": "') else name) + self.between


@dataclass(frozen=True, slots=True)
class OutputGrammar:
    """One family's markers, and how its outputs are read and its calls begun."""

    marks: Mapping[str, str]
    """The markers' texts and kinds."""
    new_machine: NewMachine
    calls: CallSyntax | None = None
    """None: how its models begin a call is not known."""
    one_call_stop: str | None = None
    """The token after which one call is whole."""
    leave_reasoning: str = "\n</think>\n\n"
    """The text that ends open reasoning."""
    text_opening: str = ""
    """The text before an answer in text."""
    turn_start: str | None = None
    """The token from which on a prompt's end is the output's own header; None: no headers."""


def marked(
    new_reader: Callable[[MessageBuilder, Sequence[Tool]], CallReader] | None,
    *,
    in_reasoning: ReasoningState = ReasoningState.DOUBT,
    bare: bool = False,
) -> NewMachine:
    """Machines for ``[<think> reasoning </think>] content`` with calls read by ``new_reader``."""

    def new_machine(
        builder: MessageBuilder, tools: Sequence[Tool], reasoning_open: bool
    ) -> StateMachine:
        read = new_reader
        return OutputMachine(
            builder,
            (lambda: read(builder, tools)) if tools and read else None,
            reasoning_open=reasoning_open,
            in_reasoning=in_reasoning,
            bare=bare,
        )

    return new_machine


def declared_names(tools: Sequence[Tool]) -> frozenset[str]:
    names = (tool.get("function", {}).get("name") for tool in tools)
    return frozenset(name for name in names if isinstance(name, str))
