"""`thinking` and `output_config`: settings of the chat template, and the format of the answer."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from any_agent.chat.template_kwargs import SWITCHES
from any_agent.completions.params.grammar import schema_grammar
from any_agent.completions.params.parameter import MAX_NOTE_BYTES
from any_agent.completions.params.schema_check import check, json_text, require_object, shown
from any_agent.errors import InvalidRequest, UnsupportedParameter

EFFORTS = ("low", "medium", "high", "xhigh", "max")
_KINDS = ("enabled", "adaptive", "disabled")


@dataclass(frozen=True, slots=True)
class Thinking:
    """A request's settings of the model's reasoning."""

    template: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template."""
    effort: str | None = None
    hidden: bool = False
    """True if answers have only the signature of the thinking."""
    recorded: dict[str, Any] = field(default_factory=dict)


def thinking_of(body: Mapping[str, Any], known_settings: Set[str]) -> Thinking:
    """Return a request's settings; ``known_settings``: the settings of the model's template.

    Raises InvalidRequest or UnsupportedParameter.
    """
    effort = _effort(body.get("output_config"))
    recorded = {} if effort is None else {"reasoning_effort": effort}
    thinking = body.get("thinking")
    if thinking is None:
        return Thinking(effort=effort, recorded=recorded)
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
    return Thinking(template, effort, display == "omitted", {**recorded, "thinking": thinking})


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


def format_of(body: Mapping[str, Any]) -> tuple[str | None, str | None]:
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
