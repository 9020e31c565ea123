"""Calls of custom tools, whose input is free text.

The model sees such a tool as a function with one text, ``input``. In messages its call is a
function's, with the type "custom"; the agent sees and sends the input alone.
"""

from __future__ import annotations

import json
from typing import Any

from any_agent.types import Message

CUSTOM = "custom"


def is_custom(call: Any) -> bool:
    """Return True for a custom tool's call."""
    return isinstance(call, dict) and call.get("type") == CUSTOM


def custom_call(id: Any, name: str, input: str) -> dict[str, Any]:
    """Return a call as a message has it."""
    arguments = json.dumps({"input": input}, ensure_ascii=False)
    return {"id": id, "type": CUSTOM, "function": {"name": name, "arguments": arguments}}


def with_inputs(message: Message) -> Message:
    """Return a message whose custom calls have OpenAI's form: ``custom: {name, input}``."""
    calls = message.get("tool_calls") or ()
    if not any(map(is_custom, calls)):
        return message
    return {**message, "tool_calls": [_as_agents_see(call) for call in calls]}


def _as_agents_see(call: dict[str, Any]) -> dict[str, Any]:
    if not is_custom(call):
        return call
    function = call["function"]
    custom = {"name": function["name"], "input": input_of(function["arguments"])}
    return {"id": call["id"], "type": CUSTOM, CUSTOM: custom}


def input_of(arguments: str) -> str:
    """Return the input in a call's arguments; other arguments than that one text as they are."""
    try:
        match json.loads(arguments):
            case {"input": str(text), **rest} if not rest:
                # A lone surrogate is a ValueError, too: no answer can have it.
                text.encode()
                return text
    except (ValueError, RecursionError):
        pass
    return arguments
