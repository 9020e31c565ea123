"""A checked request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from any_agent.completions.untrainable import UntrainableReason
from any_agent.types import GenerationHyperparameters, Message, Tool

TextInput: TypeAlias = str | tuple[int, ...]
"""One prompt of a legacy completion: a text, or token ids."""


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A request of any route, checked, with the sampling that will be used."""

    model: str
    messages: list[Message]
    """Of a chat; a legacy completion has none, but ``prompts``."""
    tools: list[Tool] | None
    """Those that the model is told of."""
    gconfig: GenerationHyperparameters
    stream: bool
    include_usage: bool
    logprobs: bool
    overrides: dict[str, Any] = field(default_factory=dict)
    """What the agent asked for and the run's sampling replaced, by the request's names."""
    recorded: dict[str, Any] = field(default_factory=dict)
    """Parameters without effect."""
    ignored: tuple[str, ...] = ()
    """Names, made plain, of parameters that nobody here knows; of what was not taken up, too."""
    n: int = 1
    """Choices, of each prompt."""
    top_logprobs: int = 0
    """How many of the likeliest tokens to tell of at each position."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """For the chat template."""
    reasoning_effort: str | None = None
    """For the chat template, too, where it has one: ``ChatFormat.effort_kwargs`` knows."""
    forced_call: str | None = None
    """The tool that must be called, "" for any; None where nothing is forced."""
    parallel_tool_calls: bool = True
    legacy_functions: bool = False
    """The tools came as `functions`: an answer has one `function_call` at most."""
    format_parameter: str | None = None
    """The one that asked for ``gconfig.grammar``."""
    structural_tag: bool = True
    """True if the engine takes that grammar as a part of a structural tag."""
    untrainable: UntrainableReason | None = None
    """Why no answer to it can be trained on."""
    prompts: tuple[TextInput, ...] = ()
    """Of a legacy completion."""
    id_prefix: str = "chatcmpl-"
    """Of the completion's id, which is its interaction's; it tells by which API the call came."""
    prompt_parameter: str = "messages"
    """What the request calls the conversation, for errors."""
    goes_on_from: str | None = None
    """The interaction that it names as the one before, where several say the same."""
    kept: Mapping[str, Any] = field(default_factory=dict)
    """What else is recorded of the request, so that its answer can be told again."""
    echo: bool = False
    """Of a legacy completion: the answer begins with the prompt."""
