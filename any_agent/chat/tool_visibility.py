"""Whether a model is told of tools at all: templates leave out what they do not know."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import lru_cache

from any_agent.chat import format_probes as probes
from any_agent.chat.format import ChatFormat
from any_agent.types import Message, Tool

_MOST = 64
_FIRST: tuple[list[Message], ...] = (
    [probes.SYSTEM, probes.USER],
    [probes.USER],
)
_LATER: tuple[list[Message], ...] = (
    [probes.USER, probes.CALLED],
    [probes.USER, probes.CALLED, probes.result(1, "3")],
)
_NAME = "add"


@dataclass(frozen=True, slots=True)
class ToolVisibility:
    tools: bool
    """They stand in a prompt; also where the template refuses them: then it says so itself."""
    calls: bool
    """Earlier calls do: such a model was taught to call, even if the agent is to tell it what."""


@lru_cache(maxsize=_MOST)
def tool_visibility(chat: ChatFormat) -> ToolVisibility:
    """Probed once for each format; some renderings of two messages."""

    def names(messages: list[Message], tools: list[Tool] | None) -> int | None:
        with contextlib.suppress(Exception):
            return chat.decode(chat.writer.prompt_ids(messages, tools)).count(_NAME)
        return None

    told = []
    for messages in _FIRST:
        without, given = names(messages, None), names(messages, probes.TOOLS)
        if without is not None:
            told.append(given is None or given > without)
    calls = False
    for messages in _LATER:
        silent = [{k: v for k, v in m.items() if k != "tool_calls"} for m in messages[:2]]
        calls = calls or (names(messages, None) or 0) > (names(silent, None) or 0)
    return ToolVisibility(any(told) or not told, calls)
