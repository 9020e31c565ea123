"""`tool_use` blocks: a call's arguments as an object, and its id in Anthropic's form.

The model may write anything, and its text must be recognised when the agent sends it back. So text
that is no JSON object, or would come back as another one (an integer beyond 64 bits becomes a
float), is an object with one field that holds the text as it is. The same call has the same id in
every API.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from any_agent.chat.conversation_hash import same_arguments
from any_agent.completions.json_body import is_deeper

INVALID = "INVALID_JSON"
"""The field that Anthropic's documents use where an agent must send back a truncated input."""
_MAX_DEPTH = 24
"""Levels that every client and the limit of our bodies can carry, with the message around them."""
_OURS = re.compile(r"toolu_([0-9a-f]{24})")
_CHAT = re.compile(r"call_([0-9a-f]{24})")


def input_of(arguments: str) -> bytes:
    """Return the JSON of a `tool_use` block's input."""
    if not arguments.strip():
        return b"{}"
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return _as_text(arguments)
    if (
        type(value) is not dict
        or _text_in(value) is not None
        or is_deeper(value, _MAX_DEPTH)
        or not same_arguments(arguments, value)
    ):
        return _as_text(arguments)
    return arguments.encode()


def arguments_of(given: dict[str, Any]) -> Any:
    """Return the arguments of a chat message's call, from the input that came back."""
    text = _text_in(given)
    return given if text is None else text


def tool_use_id(call_id: str) -> str:
    """Return a call's id in Anthropic's form; any other id stays as it is."""
    match = _CHAT.fullmatch(call_id)
    return f"toolu_{match[1]}" if match is not None else call_id


def call_id(tool_use_id: str) -> str:
    """Undo :func:`tool_use_id`: some templates render ids, and the chat form was recorded."""
    match = _OURS.fullmatch(tool_use_id)
    return f"call_{match[1]}" if match is not None else tool_use_id


def _as_text(arguments: str) -> bytes:
    return orjson.dumps({INVALID: arguments})


def _text_in(value: dict[str, Any]) -> str | None:
    if len(value) != 1:
        return None
    text = value.get(INVALID)
    return text if isinstance(text, str) else None
