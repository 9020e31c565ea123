"""Validation of a call's ``chat_template_kwargs``, and reasoning effort as such settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from any_agent.errors import InvalidRequest, UnsupportedParameter

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""The values that agents may send as ``reasoning_effort``."""

_PARAM = "chat_template_kwargs"
_MAX_SETTINGS = 16
_MAX_CHARACTERS = 256
SWITCHES = ("enable_thinking", "thinking")  # template settings that turn reasoning on and off


def check_settings(given: Any, known: frozenset[str]) -> dict[str, Any]:
    """Return the given settings, sorted by name, if the template has them.

    Raises:
        InvalidRequest: they are no object, or a value is not short and plain.
        UnsupportedParameter: the template reads no such name.
    """
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"{_PARAM} must be an object", param=_PARAM)
    if len(given) > _MAX_SETTINGS:
        raise InvalidRequest(f"{_PARAM} has more than {_MAX_SETTINGS} names", param=_PARAM)
    for name, value in given.items():
        if name not in known:
            has = ", ".join(sorted(known)) or "no settings at all"
            raise UnsupportedParameter(
                f"{_PARAM}.{str(name)[:64]!a} is unknown to this model's chat template, "
                f"which has {has}",
                param=_PARAM,
            )
        if not _is_plain(value):
            raise InvalidRequest(
                f"{_PARAM}.{name} must be a string of at most {_MAX_CHARACTERS} characters, a "
                "number, a boolean or null",
                param=_PARAM,
            )
    return dict(sorted(given.items()))


def effort_settings(
    effort: str, known: frozenset[str], own: Mapping[str, Any]
) -> dict[str, str | bool]:
    """Return ``reasoning_effort`` as template settings; {} for a template without such a control.

    A template that takes an effort gets the nearest of low, medium and high. One that can only
    switch thinking on or off stops thinking for "none"; an effort does not make it think in a run
    that has turned thinking off (``own``: the run's settings).

    Raises:
        InvalidRequest: there is no such effort.
    """
    if effort not in EFFORTS:
        raise InvalidRequest(
            f"reasoning_effort must be one of {', '.join(EFFORTS)}", param="reasoning_effort"
        )
    if "reasoning_effort" in known:
        nearest = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
        return {"reasoning_effort": nearest.get(effort, effort)}
    for switch in SWITCHES:
        if switch in known:
            off = effort == "none"
            return {switch: not off} if off or own.get(switch) is not False else {}
    return {}


def _is_plain(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= _MAX_CHARACTERS and not any("\ud800" <= c <= "\udfff" for c in value)
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int):
        return abs(value) < 2**63
    return value is None
