"""Checks a `/v1/messages` body by the table of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

from any_agent.chat.template_kwargs import SWITCHES
from any_agent.completions.messages.input_messages import Definitions, conversation_of
from any_agent.completions.messages.tools import messages_tools
from any_agent.completions.params.call import ChatCall, ParseSettings
from any_agent.completions.params.grammar import schema_grammar, unless_forced
from any_agent.completions.params.parameter import MAX_NOTE_BYTES
from any_agent.completions.params.parse import call_of, sort_parameters
from any_agent.completions.params.schema_check import check, json_text, require_object, shown
from any_agent.completions.params.table import TABLE
from any_agent.errors import InvalidRequest, UnsupportedParameter

_AS_IN_CHAT = (
    *("model", "stream", "max_tokens", "temperature", "top_p", "top_k"),
    *("chat_template_kwargs", "enable_thinking", "thinking"),
)
"""Parameters that shape the call as in `/chat/completions`."""
_PARAMETER_NAMES = {"parallel_tool_calls": ("tool_choice", "tool_choice.disable_parallel_tool_use")}


@dataclass(frozen=True, slots=True)
class MessagesCall:
    """A checked request, and the part of it that only its answer needs."""

    chat: ChatCall
    hides_thinking: bool = False
    """True if the answer has no thinking, only its signature."""


def parse_messages(body: Any, settings: ParseSettings) -> MessagesCall:
    """Check a `/v1/messages` body.

    Raises InvalidRequest or UnsupportedParameter, naming the parameter.
    """
    call = parse_count(body, settings)
    if body.get("max_tokens") is None:
        raise InvalidRequest(
            "max_tokens is required: the most tokens that the answer may have", param="max_tokens"
        )
    return call


def parse_count(body: Any, settings: ParseSettings) -> MessagesCall:
    """Check a `/v1/messages/count_tokens` body, which may lack `max_tokens`."""
    known = settings.known_settings
    body, recorded, rest = sort_parameters(body, TABLE["messages"], known, settings.unknown)
    messages = body.get("messages")
    if not messages:
        raise InvalidRequest("messages must be a list of at least one message", param="messages")
    tools = messages_tools(body, rest, refuse=settings.unknown == "refuse")
    grammar, asked_by = unless_forced(*_format(body), tools.forced, rest)
    thinking = _thinking(body, known)
    shared = {name: body.get(name) for name in _AS_IN_CHAT} | {"stop": body.get("stop_sequences")}
    if not thinking.template:
        # A template without a switch takes `thinking`, too: it only has no effect.
        shared["thinking"] = None
    call = call_of(shared, recorded, rest, settings, grammar=grammar)
    definitions = Definitions(tools.by_name)
    conversation = conversation_of(body.get("system"), messages, definitions)
    found = [each for each in tools.deferred if each["function"]["name"] in definitions.shown]
    chat = replace(
        call,
        messages=conversation,
        tools=tools.shown,
        deferred=tools.deferred,
        include_usage=True,
        recorded=call.recorded | thinking.recorded,
        reasoning_effort=thinking.effort,
        forced_call=tools.forced,
        parallel_tool_calls=tools.parallel,
        format_parameter=asked_by,
        id_prefix="msg_",
        parameter_names=_PARAMETER_NAMES,
        kept={"found_tools": found} if found else {},
    )
    return MessagesCall(chat, thinking.hidden)


EFFORTS = ("low", "medium", "high", "xhigh", "max")
_KINDS = ("enabled", "adaptive", "disabled")


@dataclass(frozen=True, slots=True)
class _ThinkingSettings:
    """A request's settings of the model's reasoning."""

    template: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template."""
    effort: str | None = None
    hidden: bool = False
    """True if answers have only the signature of the thinking."""
    recorded: dict[str, Any] = field(default_factory=dict)


def _thinking(body: Mapping[str, Any], known_settings: Set[str]) -> _ThinkingSettings:
    """Return a request's settings; ``known_settings``: the settings of the model's template.

    Raises InvalidRequest or UnsupportedParameter.
    """
    effort = _effort(body.get("output_config"))
    recorded = {} if effort is None else {"reasoning_effort": effort}
    thinking = body.get("thinking")
    if thinking is None:
        return _ThinkingSettings(effort=effort, recorded=recorded)
    kind = require_object(thinking, "thinking").get("type")
    if kind not in _KINDS:
        if isinstance(kind, str):
            raise UnsupportedParameter(
                f"thinking.type {shown(kind)} is not supported: it may be {', '.join(_KINDS)}",
                param="thinking",
            )
        raise InvalidRequest(f"thinking.type must be one of {', '.join(_KINDS)}", param="thinking")
    budget, display = thinking.get("budget_tokens"), thinking.get("display")
    if budget is not None and (type(budget) is not int or budget < 1):
        raise InvalidRequest(
            "thinking.budget_tokens must be an integer of at least 1", param="thinking"
        )
    if display is not None and not isinstance(display, str):
        raise InvalidRequest("thinking.display must be a string", param="thinking")
    json_text(thinking, "thinking", longest=MAX_NOTE_BYTES)
    switch = next((name for name in SWITCHES if name in known_settings), None)
    template: dict[str, Any] = {}
    if switch is not None and kind != "adaptive":
        template[switch] = kind == "enabled"
    elif kind == "disabled":
        # A template without a switch may still take an effort: "none" is the least.
        effort = "none"
    if template.get(switch or "") is False:
        effort = None
    return _ThinkingSettings(
        template, effort, display == "omitted", {**recorded, "thinking": thinking}
    )


def _effort(config: Any) -> str | None:
    if config is None:
        return None
    for name, value in require_object(config, "output_config").items():
        if name not in ("effort", "format") and value is not None:
            raise UnsupportedParameter(
                f"output_config.{str(name)[:64]!a} is not supported: it may have effort and format",
                param="output_config",
            )
    effort: str | None = config.get("effort")
    if effort is not None:
        check(effort, {"enum": list(EFFORTS)}, "output_config.effort")
    return effort


def _format(body: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the answer's format as an engine takes it, and the parameter that requests it.

    Raises InvalidRequest or UnsupportedParameter.
    """
    config = body.get("output_config")
    found = {
        "output_config.format": config.get("format") if isinstance(config, dict) else None,
        "output_format": body.get("output_format"),
    }
    given = {name: value for name, value in found.items() if value is not None}
    if len(given) > 1:
        raise InvalidRequest(
            "output_format and output_config.format contradict each other", param="output_format"
        )
    for name, value in given.items():
        wanted = require_object(value, name)
        if wanted.get("type") != "json_schema":
            raise UnsupportedParameter(f"{name} must be of type json_schema", param=name)
        return schema_grammar(wanted.get("schema"), name), name
    return None, None
