"""What frameworks do to an answer before they send it back."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any, TypeAlias

from any_agent.types import Message, Tool

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


def null_for_empty(message: Message, rng: random.Random) -> Message:
    """Or no such field."""
    out = {k: v for k, v in message.items() if k != "content" or v}
    return out if rng.random() < 0.5 else {"content": None} | out


def parts(message: Message, _rng: random.Random) -> Message:
    text = message.get("content")
    return message | {"content": [{"type": "text", "text": text}] if text else text}


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


def meddle(
    messages: list[Message], tools: list[Tool] | None, rng: random.Random
) -> tuple[list[Message], list[Tool] | None]:
    """A request that says something else than what was answered before."""
    changed = [dict(message) for message in messages]
    kind = rng.choice(("answer", "history", "calls", "tools", "drop", "system"))
    answers = [m for m in changed if m["role"] == "assistant"]
    asked = [m for m in changed[:-1] if m["role"] == "user"]
    called = [m for m in answers if m.get("tool_calls")]
    if kind == "answer" and answers:
        answer = rng.choice(answers)
        answer["content"] = (answer.get("content") or "") + " or so"
    elif kind == "history" and asked:
        rng.choice(asked)["content"] += "!"
    elif kind == "calls" and called:
        answer = rng.choice(called)
        first, *others = answer["tool_calls"]
        function = first["function"] | {"arguments": '{"a": 1000}'}
        answer["tool_calls"] = [first | {"function": function}, *others]
    elif kind == "tools":
        tools = [tool | {"function": tool["function"] | {"name": "sub"}} for tool in tools or []]
    elif kind == "drop" and len(answers) > 1 and not answers[0].get("tool_calls"):
        changed = [m for m in changed if m is not answers[0]]
    elif changed[0]["role"] == "system":
        changed[0]["content"] += " Always."
    return changed, tools or None


CLIENTS: dict[str, Client] = {
    "echo": echo,
    "dump": dump,
    "drop_reasoning": drop_reasoning,
    "rewrite_calls": rewrite_calls,
    "empty_for_null": empty_for_null,
    "null_for_empty": null_for_empty,
    "parts": parts,
}
