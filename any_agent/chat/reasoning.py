"""Extraction of an answer's reasoning, in whatever field a framework puts it."""

from __future__ import annotations

import re
from typing import Any

from any_agent.chat.message_validation import text_of

_FIELDS = ("reasoning_content", "reasoning")
_THINKING = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)


def split_thinking(text: str) -> tuple[str, str]:
    """Split a content into its leading reasoning (`<think>...</think>`) and the rest."""
    match = _THINKING.match(text)
    return (match[1], text[match.end() :]) if match is not None else ("", text)


def reasoning_of(message: Any) -> str:
    """Return a message's reasoning without white space around it, "" for none."""
    if not isinstance(message, dict):
        return ""
    for field in _FIELDS:
        value = message.get(field)
        if isinstance(value, str) and value.strip():
            return value.strip()
    return split_thinking(text_of(message.get("content")) or "")[0].strip()
