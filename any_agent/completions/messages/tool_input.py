"""What a tool is called with: text as the model writes it, an object as Anthropic's API has it.

The model may write anything, and what it wrote must be known again when the agent sends it back. So
what is no JSON object, or would come back as another one (an integer beyond 64 bits is a float
then), is an object with one field that holds the text as it is.
"""

from __future__ import annotations

from typing import Any

import orjson

from any_agent.chat.conversation_hash import same_arguments
from any_agent.completions.json_body import require_shallow
from any_agent.errors import InvalidRequest

INVALID = "INVALID_JSON"
"""As Anthropic's documents call it where an agent must send back what was cut off."""
_DEEPEST = 24
"""Levels that every client and the limit of our bodies can carry, with the message around them."""


def input_of(arguments: str) -> bytes:
    """The JSON of a `tool_use` block's input."""
    if not arguments.strip():
        return b"{}"
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return _as_text(arguments)
    if (
        type(value) is not dict
        or _text_in(value) is not None
        or _is_deep(value)
        or not same_arguments(arguments, value)
    ):
        return _as_text(arguments)
    return arguments.encode()


def arguments_of(given: dict[str, Any]) -> Any:
    """What a call of a chat message has as its arguments, from what came back."""
    text = _text_in(given)
    return given if text is None else text


def _as_text(arguments: str) -> bytes:
    return orjson.dumps({INVALID: arguments})


def _text_in(value: dict[str, Any]) -> str | None:
    if len(value) != 1:
        return None
    text = value.get(INVALID)
    return text if isinstance(text, str) else None


def _is_deep(value: Any) -> bool:
    try:
        require_shallow(value, _DEEPEST)
    except InvalidRequest:
        return True
    return False
