"""What frameworks do to an answer before they send it back."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any, TypeAlias

from any_agent.types import Message

Client: TypeAlias = Callable[[Message, random.Random], Message]


def echo(message: Message, _rng: random.Random) -> Message:
    return message


def dump(message: Message, _rng: random.Random) -> Message:
    """As the OpenAI SDK's ``model_dump`` does: every field that there is, null or not."""
    unset = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "tool_calls"))
    return unset | message


def drop_reasoning(message: Message, _rng: random.Random) -> Message:
    return {k: v for k, v in message.items() if k != "reasoning_content"}


def rewrite_calls(message: Message, rng: random.Random) -> Message:
    """Call ids of its own, arguments parsed and written again."""
    out = drop_reasoning(message, rng)
    if out.get("tool_calls"):
        out["tool_calls"] = [_rewritten(call, rng) for call in out["tool_calls"]]
    return out


def empty_for_null(message: Message, _rng: random.Random) -> Message:
    return message | {"content": message.get("content") or ""}


def null_for_empty(message: Message, _rng: random.Random) -> Message:
    out = {k: v for k, v in message.items() if k != "content" or v}
    return out if rng_even(message) else out | {"content": message.get("content") or None}


def parts(message: Message, _rng: random.Random) -> Message:
    text = message.get("content")
    return message | {"content": [{"type": "text", "text": text}] if text else text}


def rng_even(message: Message) -> bool:
    return len(str(message.get("content") or "")) % 2 == 0


def _rewritten(call: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    function = dict(call["function"])
    try:
        value = json.loads(function["arguments"])
    except ValueError:
        value = None
    if isinstance(value, dict):
        keys = sorted(value, reverse=rng.random() < 0.5)
        style: dict[str, Any] = rng.choice(({"separators": (",", ":")}, {"indent": 1}, {}))
        function["arguments"] = json.dumps({k: value[k] for k in keys}, **style)
    return {"id": "own_" + call["id"][-4:], "type": "function", "function": function}


CLIENTS: dict[str, Client] = {
    "echo": echo,
    "dump": dump,
    "drop_reasoning": drop_reasoning,
    "rewrite_calls": rewrite_calls,
    "empty_for_null": empty_for_null,
    "null_for_empty": null_for_empty,
    "parts": parts,
}
