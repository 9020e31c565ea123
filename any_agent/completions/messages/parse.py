"""Checks a `/v1/messages` body by the table of parameters."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from any_agent.completions.messages.input_messages import conversation_of
from any_agent.completions.messages.thinking import format_of, thinking_of
from any_agent.completions.messages.tools import messages_tools
from any_agent.completions.params.call import ChatCall
from any_agent.completions.params.grammar import unless_forced
from any_agent.completions.params.parameter import UnknownParameters
from any_agent.completions.params.parse import sort_parameters, untrainable_by
from any_agent.completions.params.sampling import sampling_of
from any_agent.completions.params.table import TABLE
from any_agent.completions.params.template_kwargs import template_kwargs_of
from any_agent.errors import InvalidRequest
from any_agent.types import GenerationHyperparameters, SessionMode

_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k")
_PARAMETER_NAMES = {"parallel_tool_calls": ("tool_choice", "tool_choice.disable_parallel_tool_use")}


@dataclass(frozen=True, slots=True)
class MessagesCall:
    """A checked request, and the part of it that only its answer needs."""

    chat: ChatCall
    hides_thinking: bool = False
    """True if the answer has no thinking, only its signature."""


def parse_messages(
    body: Any,
    *,
    mode: SessionMode,
    sampling: GenerationHyperparameters,
    model: str,
    known_settings: Set[str] = frozenset(),
    unknown: UnknownParameters = "record",
) -> MessagesCall:
    """Check a `/v1/messages` body; ``known_settings``: the settings of the model's chat template.

    In train sessions the run's ``sampling`` replaces the agent's, and the smaller token limit of
    both holds. Raises InvalidRequest or UnsupportedParameter, naming the parameter.
    """
    found = _call(body, mode, sampling, model, known_settings, unknown)
    if body.get("max_tokens") is None:
        raise InvalidRequest(
            "max_tokens is required: the most tokens that the answer may have", param="max_tokens"
        )
    return found


def parse_count(
    body: Any,
    *,
    model: str,
    known_settings: Set[str] = frozenset(),
    unknown: UnknownParameters = "record",
) -> ChatCall:
    """Check a `/v1/messages/count_tokens` body, which may lack `max_tokens`."""
    run = GenerationHyperparameters()
    return _call(body, SessionMode.EVAL, run, model, known_settings, unknown).chat


def _call(
    body: Any,
    mode: SessionMode,
    sampling: GenerationHyperparameters,
    model: str,
    known_settings: Set[str],
    unknown: UnknownParameters,
) -> MessagesCall:
    body, recorded, rest = sort_parameters(body, TABLE["messages"], known_settings, unknown)
    messages = body.get("messages")
    if not messages:
        raise InvalidRequest("messages must be a list of at least one message", param="messages")
    tools = messages_tools(body)
    grammar, asked_by = unless_forced(*format_of(body), tools.forced, rest)
    thinking = thinking_of(body, known_settings)
    # A template without a switch takes `thinking`, too: it only has no effect.
    switches = body if thinking.template else {**body, "thinking": None}
    template_kwargs = template_kwargs_of(switches, rest, known_settings, unknown)
    sampled = {name: body[name] for name in _SAMPLING if body.get(name) is not None}
    gconfig, overrides = sampling_of(
        sampled | {"stop": body.get("stop_sequences")},
        mode=mode,
        run=sampling,
        tokens=sampling.max_new_tokens,
        grammar=grammar,
    )
    chat = ChatCall(
        model=body.get("model") or model,
        messages=conversation_of(body.get("system"), messages),
        tools=tools.rendered,
        gconfig=gconfig,
        stream=bool(body.get("stream")),
        include_usage=True,
        logprobs=False,
        overrides=overrides,
        recorded=recorded | rest.recorded | thinking.recorded,
        ignored=tuple(rest.ignored),
        template_kwargs=template_kwargs,
        reasoning_effort=thinking.effort,
        forced_call=tools.forced,
        parallel_tool_calls=tools.parallel,
        format_parameter=asked_by,
        untrainable=untrainable_by(gconfig, tools.forced),
        id_prefix="msg_",
        parameter_names=_PARAMETER_NAMES,
    )
    return MessagesCall(chat, thinking.hidden)
