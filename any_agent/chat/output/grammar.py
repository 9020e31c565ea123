"""What a family's outputs look like."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from any_agent.chat.output.builder import MessageBuilder
from any_agent.chat.output.machine import CallReader, InReasoning, Machine, OutputMachine
from any_agent.chat.output.marks import THINK_CLOSE, THINK_OPEN
from any_agent.types import Tool

THINK: Mapping[str, str] = {"<think>": THINK_OPEN, "</think>": THINK_CLOSE}

NewMachine = Callable[[MessageBuilder, Sequence[Tool], bool], Machine]
"""Of the builder, the request's tools, and whether the prompt ends inside reasoning."""


@dataclass(frozen=True, slots=True)
class OutputGrammar:
    """One family's markers, and how its outputs are read and its calls begun."""

    marks: Mapping[str, str]
    """The markers' texts and kinds."""
    new_machine: NewMachine
    open_call: Callable[[str | None], str] | None = None
    """The text that makes the model call this tool (any one, if None); where it may write on."""
    one_call_stop: str | None = None
    """The token after which one call is whole."""
    leave_reasoning: str = "\n</think>\n\n"
    """The text that ends open reasoning."""
    turn_start: str | None = None
    """The token from which on a prompt's end is the output's own header; None: no headers."""


def marked(
    new_reader: Callable[[MessageBuilder, Sequence[Tool]], CallReader] | None,
    *,
    in_reasoning: InReasoning = InReasoning.DOUBT,
    bare: bool = False,
) -> NewMachine:
    """Machines for ``[<think> reasoning </think>] content`` with calls read by ``new_reader``."""

    def new_machine(
        builder: MessageBuilder, tools: Sequence[Tool], reasoning_open: bool
    ) -> Machine:
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
