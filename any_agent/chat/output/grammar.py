"""The description of a family's outputs: markers, state machine, syntax of calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from any_agent.chat.output.json_stream import quoted
from any_agent.chat.output.markers import THINK_CLOSE, THINK_OPEN
from any_agent.chat.output.message import MessageBuilder
from any_agent.chat.output.state_machine import (
    CallReader,
    OutputMachine,
    ReasoningState,
    StateMachine,
)
from any_agent.types import Tool

THINK: Mapping[str, str] = {"<think>": THINK_OPEN, "</think>": THINK_CLOSE}

NewMachine = Callable[[MessageBuilder, Sequence[Tool], bool], StateMachine]
"""Arguments: the builder, the request's tools, and True if the prompt ends inside reasoning."""


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """The text that a family's models write around a call's name and arguments."""

    begin: str
    """The text up to the name."""
    between: str
    """The text between the name and the arguments."""
    end: str
    opening: str = ""
    """The text before the first call; ``closing`` comes after the last."""
    closing: str = ""
    separator: str | None = "\n"
    """The text between two calls; None: one call at a time."""
    parameter: tuple[str, str, str] | None = None
    """The texts around each argument's name and value; None: the arguments are a JSON object."""

    def open(self, name: str | None) -> str:
        """Return the text after which the model writes a call of this tool (of any, if None)."""
        text = self.opening + self.begin
        if name is None:
            return text
        # A name in quotes is a JSON string.
        return text + (quoted(name)[1:-1] if text.endswith('"name": "') else name) + self.between


@dataclass(frozen=True, slots=True)
class OutputGrammar:
    """One family's markers, state machine and call syntax."""

    marks: Mapping[str, str]
    """The markers' texts and kinds."""
    new_machine: NewMachine
    calls: CallSyntax | None = None
    """The syntax of calls; None if the text that begins a call is unknown."""
    one_call_stop: str | None = None
    """The token after which one call is complete."""
    leave_reasoning: str = "\n</think>\n\n"
    """The text that ends open reasoning."""
    text_opening: str = ""
    """The text before an answer in text."""
    turn_start: str | None = None
    """The token that begins the output's own header at a prompt's end; None: no headers."""


def marked(
    new_reader: Callable[[MessageBuilder, Sequence[Tool]], CallReader] | None,
    *,
    in_reasoning: ReasoningState = ReasoningState.DOUBT,
    bare: bool = False,
) -> NewMachine:
    """Make machines for ``[<think> reasoning </think>] content``, calls read by ``new_reader``."""

    def new_machine(
        builder: MessageBuilder, tools: Sequence[Tool], reasoning_open: bool
    ) -> StateMachine:
        return OutputMachine(
            builder,
            partial(new_reader, builder, tools) if tools and new_reader else None,
            reasoning_open=reasoning_open,
            in_reasoning=in_reasoning,
            bare=bare,
        )

    return new_machine


def declared_names(tools: Sequence[Tool]) -> frozenset[str]:
    names = (tool.get("function", {}).get("name") for tool in tools)
    return frozenset(name for name in names if isinstance(name, str))
