"""What the template writes for an answer is read back as that answer, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from any_agent.chat import ChatFormat
from any_agent.chat import format_probes as probes
from any_agent.doctor.reference_template import (
    NO_TOOLS,
    ReferenceTemplate,
    TemplateRefused,
    TemplateTurn,
)
from any_agent.doctor.scripted_conversation import ScriptedConversation, merged
from any_agent.doctor.verdict import Check, Verdict
from any_agent.errors import AnyAgentError
from any_agent.types import Message

LAW = Check("parsing")
_DO = (
    "set model.renderer to this model's family; with this one agents would not get what the "
    "model said"
)
_CASES = (
    ("text", probes.TEXT),
    ("reasoning", probes.REASONED),
    ("call", probes.CALLED),
    ("text and call", probes.TEXT_AND_CALL),
    ("two calls", probes.CALLED_TWICE),
)
_CUTS = (("truncated call", probes.CALLED), ("unclosed reasoning", probes.REASONED))
_STEPS = (1, 3, None)
"""Tokens a chunk; None: all at once."""


async def parsing(chat: ChatFormat, template: ReferenceTemplate) -> AsyncIterator[Verdict]:
    """Of each kind of answer, and of those whose end is missing."""
    for name, answer in _CASES:
        yield await _checked(name, answer, chat, template, cut=False)
    for name, answer in _CUTS:
        yield await _checked(name, answer, chat, template, cut=True)


async def _checked(
    name: str, answer: Message, chat: ChatFormat, template: ReferenceTemplate, *, cut: bool
) -> Verdict:
    tools = probes.TOOLS if answer.get("tool_calls") else None
    if tools and not template.takes_tools:
        return LAW.declined(name, NO_TOOLS)
    then = probes.result(1, "3") if tools else probes.NEXT
    try:
        turn = template.turn([probes.USER], tools, answer, then)
        calls = answer.get("tool_calls", [])
        if turn.output.count("add") < len(calls):
            few = "no calls" if "add" not in turn.output else "one call at a time"
            raise TemplateRefused(f"the template writes {few}")
        for field in ("reasoning_content", "content"):
            if answer.get(field, "") not in turn.output:
                raise TemplateRefused(f"the template leaves {field} out of such an answer")
        if cut:
            return await _cut(name, turn, chat)
        return await _whole(name, turn, chat)
    except TemplateRefused as error:
        return LAW.unchecked(name, str(error))
    except AnyAgentError as error:
        return LAW.failed(name, error.message, _DO)


async def _whole(name: str, turn: TemplateTurn, chat: ChatFormat) -> Verdict:
    heard = await _heard(turn, turn.output_ids, chat)
    if isinstance(heard, str):
        return LAW.failed(name, heard, _DO)
    if _plain(heard) == _plain(turn.answer):
        return LAW.passed(name, "read back as it was written, whole and streamed")
    if turn.tools and not heard.get("tool_calls") and "add" in str(heard["content"]):
        return LAW.declined(name, "how this template writes calls is not known: they stay text")
    plain, answer = _plain(heard), _plain(turn.answer)
    if plain["calls"] == answer["calls"] and plain["reasoning"] == answer["content"] != "":
        return LAW.declined(name, "the template writes text beside a call as reasoning")
    seen = f"{turn.output[:60]!r} is read as {json.dumps(_plain(heard))[:120]}"
    return LAW.failed(name, seen, _DO)


async def _cut(name: str, turn: TemplateTurn, chat: ChatFormat) -> Verdict:
    """Nothing may be lost, and nothing made up, wherever the tokens ran out."""
    ids = turn.output_ids
    for length in range(1, len(ids), max(1, len(ids) // 12)):
        heard = await _heard(turn, ids[:length], chat)
        if isinstance(heard, str):
            return LAW.failed(name, f"cut after {length} tokens, {heard}", _DO)
        for call in heard.get("tool_calls") or []:
            if call["function"]["name"] != "add":
                seen = f"cut after {length} tokens, a call of {call['function']['name']!r} is read"
                return LAW.failed(name, seen, _DO)
    return LAW.passed(name, f"read at {len(range(1, len(ids), max(1, len(ids) // 12)))} cuts")


async def _heard(turn: TemplateTurn, ids: list[int], chat: ChatFormat) -> Message | str:
    """The message that whole and streamed answers give; what is wrong if they differ."""
    message: Message | None = None
    for step in _STEPS:
        rehearsal = ScriptedConversation(chat, turn.tools)
        completion, deltas = await rehearsal.call(turn.messages, ids, step=step)
        message = completion.interaction.output_message
        streamed = merged(deltas)
        if _plain(streamed) != _plain(message) or streamed.get("content") != message["content"]:
            told = json.dumps(_plain(streamed))[:80]
            return f"a stream of {step or len(ids)} tokens a chunk says {told}, the whole another"
    assert message is not None
    return message


def _plain(message: Message) -> dict[str, Any]:
    """What an agent reads: without ids, space around text, and spelling of arguments."""
    calls = [
        {"name": c["function"]["name"], "arguments": _value(c["function"]["arguments"])}
        for c in message.get("tool_calls") or []
    ]
    return {
        "content": (message.get("content") or "").strip(),
        "reasoning": (message.get("reasoning_content") or "").strip(),
        "calls": calls,
    }


def _value(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
