"""A call's own settings of the chat template (``chat_template_kwargs``), and reasoning effort."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from any_agent.errors import InvalidRequest, UnsupportedParameter

Settings = tuple[tuple[str, Any], ...]
"""Sorted by name, so that equal ones are one key."""

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""What agents may ask for as ``reasoning_effort``."""

_PARAM = "chat_template_kwargs"
_MOST = 16
_LONGEST = 256
"""Characters of a value."""
SWITCHES = ("enable_thinking", "thinking")


def check_settings(asked: Any, known: frozenset[str]) -> Settings:
    """The settings as they were asked for, if the template has them.

    Raises:
        InvalidRequest: they are no object, or a value is no short plain one.
        UnsupportedParameter: the template reads no such name.
    """
    if not isinstance(asked, Mapping):
        raise InvalidRequest(f"{_PARAM} must be an object", param=_PARAM)
    if len(asked) > _MOST:
        raise InvalidRequest(f"{_PARAM} has more than {_MOST} names", param=_PARAM)
    for name, value in asked.items():
        if name not in known:
            has = ", ".join(sorted(known)) or "no settings at all"
            raise UnsupportedParameter(
                f"{_PARAM}.{str(name)[:64]!a} is unknown to this model's chat template, "
                f"which has {has}",
                param=_PARAM,
            )
        if not _is_plain(value):
            raise InvalidRequest(
                f"{_PARAM}.{name} must be a string of at most {_LONGEST} characters, a number, "
                "a boolean or null",
                param=_PARAM,
            )
    return tuple(sorted(asked.items()))


def effort_settings(
    effort: str, known: frozenset[str], own: Mapping[str, Any]
) -> dict[str, str | bool]:
    """What ``reasoning_effort`` means to a template; {} where it has no such control.

    A template that takes an effort gets the nearest of low, medium and high. One that can only
    think or not stops thinking for "none"; it is not made to think by an effort in a run that
    has turned thinking off (``own``: the run's settings).

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
        return len(value) <= _LONGEST and not any("\ud800" <= c <= "\udfff" for c in value)
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int):
        return abs(value) < 2**63
    return value is None
