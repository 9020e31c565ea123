"""Ids of calls as Anthropic's API writes them: the same call has the same id in every API."""

from __future__ import annotations

import re

_OURS = re.compile(r"toolu_([0-9a-f]{24})")
_CHAT = re.compile(r"call_([0-9a-f]{24})")


def tool_use_id(call_id: str) -> str:
    """Of a call's id; one that is not of our making stays as it is."""
    match = _CHAT.fullmatch(call_id)
    return f"toolu_{match[1]}" if match is not None else call_id


def call_id(tool_use_id: str) -> str:
    """What :func:`tool_use_id` was given: some templates write ids, and this one was recorded."""
    match = _OURS.fullmatch(tool_use_id)
    return f"call_{match[1]}" if match is not None else tool_use_id
