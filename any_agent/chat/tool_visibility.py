"""Detection of templates that leave tools or calls out of the prompt."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import lru_cache

from any_agent.chat import format_probes as probes
from any_agent.chat.format import ChatFormat
from any_agent.types import Message, Tool

_MAX_FORMATS = 64
_FIRST: tuple[list[Message], ...] = ([probes.SYSTEM, probes.USER], [probes.USER])
_LATER: tuple[list[Message], ...] = (
    [probes.USER, probes.CALLED],
    [probes.USER, probes.CALLED, probes.result(1, "3")],
)
_NAME = "add"


@dataclass(frozen=True, slots=True)
class ToolVisibility:
    """The parts of tool use that a prompt shows to the model."""

    tools: bool
    """True if tools stand in a prompt, or the template refuses them with its own error."""
    calls: bool
    """True if earlier calls do: such a model was trained to call, even if the agent must describe
    the tools in a message."""


@lru_cache(maxsize=_MAX_FORMATS)
def tool_visibility(chat: ChatFormat) -> ToolVisibility:
    """Probe a format, once for each; the cost is some renderings of two messages."""

    def count_names(messages: list[Message], tools: list[Tool] | None) -> int | None:
        with contextlib.suppress(Exception):
            return chat.decode(chat.renderer.prompt_ids(messages, tools)).count(_NAME)
        return None

    visible = []
    for messages in _FIRST:
        without, given = count_names(messages, None), count_names(messages, probes.TOOLS)
        if without is not None:
            visible.append(given is None or given > without)
    calls = False
    for messages in _LATER:
        silent = [{k: v for k, v in m.items() if k != "tool_calls"} for m in messages[:2]]
        calls = calls or (count_names(messages, None) or 0) > (count_names(silent, None) or 0)
    return ToolVisibility(any(visible) or not visible, calls)
