"""Several system messages at the beginning, for templates that take one there.

Agents send several: system and developer, instructions and a developer's item, one for each part of
a framework. Qwen3.5's template and later ones refuse all but the first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from any_agent.chat import format_probes as probes
from any_agent.types import Message, Tool

Render: TypeAlias = Callable[[list[Message], list[Tool] | None], Any]
"""Renders validated messages, and raises whatever a template raises."""

_ONE = [probes.SYSTEM, probes.USER]
_TWO = [probes.SYSTEM, {**probes.SYSTEM, "content": "Be kind."}, probes.USER]


class LeadingSystem:
    """Joins the system messages that begin a conversation, where a template refuses several.

    A template that takes them apart gets them apart.
    """

    def __init__(self, render: Render) -> None:
        # By tools, which a template may write into the system message.
        self._joins = {bool(tools): _refuses_two(render, tools) for tools in (None, probes.TOOLS)}

    def join(self, messages: list[Message], *, tools: bool) -> list[Message]:
        """Return the messages with their first system messages as one, a blank line between texts.

        The text is what a framework that merges them would have sent, so the conversation's key is
        the same. Without several the same list comes back.
        """
        end = next((k for k, m in enumerate(messages) if not _is_plain(m)), len(messages))
        if end < 2 or not self._joins[tools]:
            return messages
        texts = [m["content"] for m in messages[:end] if m["content"]]
        return [{**messages[0], "content": "\n\n".join(texts)}, *messages[end:]]


def _is_plain(message: Message) -> bool:
    # One name could not stand for several.
    return message["role"] == "system" and "name" not in message


def _refuses_two(render: Render, tools: list[Tool] | None) -> bool:
    """Return True if the template takes one system message, but not two."""
    try:
        render(_ONE, tools)
    except Exception:
        return False
    try:
        render(_TWO, tools)
    except Exception:
        return True
    return False
