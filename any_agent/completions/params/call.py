"""A checked request of any API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from any_agent.completions.params.parameter import UnknownParameters
from any_agent.completions.untrainable import UntrainableReason, has_modified_distribution
from any_agent.types import GenerationHyperparameters, Message, SessionMode, Tool

TextInput: TypeAlias = str | tuple[int, ...]
"""One prompt of a legacy completion: a text, or token ids."""


@dataclass(frozen=True, slots=True)
class ParseSettings:
    """The facts beside the body that the parsers of bodies have in common."""

    mode: SessionMode
    sampling: GenerationHyperparameters
    """The run's sampling. In train sessions it replaces the agent's, and the smaller token limit of
    both holds; eval sessions keep the agent's own, except the run's token limit, and have the run's
    temperature where the agent sets none (1 in implicit ones)."""
    model: str
    """The policy's name, for a body without one."""
    known_settings: Set[str] = frozenset()
    """The settings of the model's chat template, by which its switches are known."""
    unknown: UnknownParameters = "record"


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A checked request of any API, with the sampling that will be used."""

    model: str
    messages: list[Message]
    """The conversation; a legacy completion has ``prompts`` instead."""
    tools: list[Tool] | None
    """The tools that the prompt's head shows."""
    gconfig: GenerationHyperparameters
    deferred: Sequence[Tool] = ()
    """Further tools that may be called. Only messages show them, so they distinguish no prompts."""
    custom: frozenset[str] = frozenset()
    """The names of custom tools, which ``tools`` has as functions."""
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    overrides: dict[str, Any] = field(default_factory=dict)
    """The agent's values that the run's sampling replaced, by the request's names."""
    recorded: dict[str, Any] = field(default_factory=dict)
    """Parameters without effect, by name."""
    ignored: tuple[str, ...] = ()
    """Plain names of unknown parameters, and of known ones that have no effect in this request."""
    n: int = 1
    """The choices of each prompt."""
    top_logprobs: int = 0
    """The number of the likeliest tokens to report at each position."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template."""
    reasoning_effort: str | None = None
    """The effort, as ``ChatFormat.effort_kwargs`` makes it an argument of the chat template."""
    forced_call: str | None = None
    """The tool that must be called, "" for any; None where none must be."""
    parallel_tool_calls: bool = True
    legacy_functions: bool = False
    """The tools came as `functions`: an answer has one `function_call` at most."""
    format_parameter: str | None = None
    """The parameter that requested ``gconfig.grammar``."""
    structural_tag: bool = True
    """True if the engine takes a grammar as a part of a structural tag."""
    bound_tokens: bool = False
    """True if the engine tells which tokens a grammar decided."""
    prompts: tuple[TextInput, ...] = ()
    """The prompts of a legacy completion."""
    id_prefix: str = "chatcmpl-"
    """The prefix of the completion's id, by which its API is recognised."""
    prompt_parameter: str = "messages"
    """The request's name of the conversation, for errors."""
    parameter_names: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """For errors, by chat's parameter: the request's name of it, and of the part that is meant."""
    goes_on_from: str | None = None
    """The interaction that the request names as the one before; it decides among equal ones."""
    kept: Mapping[str, Any] = field(default_factory=dict)
    """Further entries of the recorded request, from which its answer can be encoded again."""
    echo: bool = False
    """True if a legacy completion's answer begins with the prompt."""

    @property
    def callable_tools(self) -> list[Tool]:
        """Return all tools that may be called."""
        return [*(self.tools or ()), *self.deferred]

    @property
    def untrainable(self) -> UntrainableReason | None:
        """Return the reason why no answer can be trained on, if it is known before any."""
        reason = has_modified_distribution(self.gconfig)
        return None if reason == "grammar" and self.bound_tokens else reason
