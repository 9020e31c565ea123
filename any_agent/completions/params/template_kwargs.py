"""The chat template's own settings: `chat_template_kwargs`, and switches at the top level."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from any_agent.chat.template_kwargs import SWITCHES
from any_agent.completions.params.parameter import MAX_NOTE_BYTES, UnknownParameters
from any_agent.completions.params.schema_check import json_text, shown
from any_agent.completions.params.unknown_fields import UnknownFields
from any_agent.errors import InvalidRequest, UnsupportedParameter

_KWARGS = "chat_template_kwargs"
_TYPES = {"enabled": True, "disabled": False, "adaptive": None, "auto": None}


def template_kwargs_of(
    body: Mapping[str, Any],
    rest: UnknownFields,
    known_settings: Set[str],
    unknown: UnknownParameters,
) -> dict[str, Any]:
    """Return the settings of the template, from both forms of giving them.

    A switch that the template lacks is ignored, as ``rest`` tells then, or refused. Raises
    InvalidRequest for forms that contradict each other, UnsupportedParameter.
    """
    kwargs = dict(body.get(_KWARGS) or {})
    told = {name: (name, value) for name, value in rest.settings.items() if value is not None}
    for name in SWITCHES:
        given = body.get(name)
        value = _on(name, given)
        if isinstance(given, dict):
            json_text(given, name, longest=MAX_NOTE_BYTES)
            rest.recorded[name] = given
        if value is None:
            continue
        # Either name is meant for the one switch that a template has.
        switch = next((each for each in (name, *SWITCHES) if each in known_settings), None)
        if switch is not None:
            before = told.setdefault(switch, (name, value))
            _require_same(name, value, *before)
        elif unknown == "refuse":
            raise UnsupportedParameter(
                f"{name} is unknown to this model's chat template: leave it out", param=name
            )
        else:
            rest.ignore(name, given)
    for setting, (name, value) in told.items():
        if kwargs.get(setting) is not None:
            _require_same(name, value, f"{_KWARGS}.{setting}", kwargs[setting])
        kwargs[setting] = value
    return kwargs


def _on(name: str, value: Any) -> bool | None:
    """True or False if it switches thinking on or off; None if it leaves that to the run."""
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, dict) or name != "thinking":
        raise InvalidRequest(f"{name} must be true or false", param=name)
    kind = value.get("type")
    if not isinstance(kind, str):
        raise InvalidRequest(
            'thinking must be true, false or {"type": "enabled"} or the like', param=name
        )
    if kind not in _TYPES:
        raise UnsupportedParameter(
            f"thinking.type {shown(kind)} is not supported: it may be {', '.join(_TYPES)}",
            param=name,
        )
    return _TYPES[kind]


def _require_same(name: str, value: Any, other: str, than: Any) -> None:
    if type(value) is not type(than) or value != than:
        raise InvalidRequest(f"{name} and {other} contradict each other: leave one out", param=name)
