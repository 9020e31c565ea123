"""Bodies to parse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from any_agent.completions.messages.parse import parse_messages
from any_agent.completions.params.call import ChatCall, ParseSettings
from any_agent.completions.params.parse import parse_chat, parse_completion
from any_agent.completions.responses.parse import parse_responses
from any_agent.types import GenerationHyperparameters, SessionMode

RUN = GenerationHyperparameters(max_new_tokens=100)
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {}}}
OTHER: dict[str, Any] = {"type": "function", "function": {"name": "g"}}
USER = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": USER},
    "completions": {"prompt": "hi"},
    "responses": {"input": "hi"},
    "messages": {"messages": USER, "max_tokens": 100},
}
PARSERS: dict[str, Callable[..., ChatCall]] = {
    "chat": parse_chat,
    "completions": parse_completion,
    "responses": lambda body, settings: parse_responses(body, settings).chat,
    "messages": lambda body, settings: parse_messages(body, settings).chat,
}
_LEAST: Any = object()


def parse(
    mode: str = "train",
    run: GenerationHyperparameters = RUN,
    *,
    api: str = "chat",
    body: Any = _LEAST,
    told: dict[str, Any] | None = None,
    **fields: Any,
) -> ChatCall:
    """``parse("eval", temperature=0)``: the least that can be asked, and these. ``told``: further
    settings of the parser."""
    if body is _LEAST:
        body = {**BODIES[api], **fields}
    return PARSERS[api](body, ParseSettings(SessionMode(mode), run, "policy", **told or {}))
