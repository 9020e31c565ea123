"""A checked Responses request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from any_agent.completions.params import ChatCall

DEFAULTS: Mapping[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "store": True,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "user": None,
}
"""What an answer repeats of its request, as it is where the request says nothing."""


@dataclass(frozen=True, slots=True)
class ResponsesCall:
    """A request of `/v1/responses`, checked."""

    chat: ChatCall
    """The same as a chat call."""
    repeated: Mapping[str, Any] = field(default_factory=dict)
    """What the answer says of its request, where it is not :data:`DEFAULTS`."""
    logprobs: bool = False
    encrypted: bool = False
    """Whether reasoning is told once more as a text that brings it back."""
