"""The law that an answer as the template writes it parses to that answer, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from any_agent.chat import ChatFormat
from any_agent.chat import format_probes as probes
from any_agent.doctor.reference_template import NO_TOOLS, ReferenceTemplate, TemplateTurn
from any_agent.doctor.scripted_conversation import ScriptedConversation, merged
from any_agent.doctor.verdict import Check, Declined, Failed, Unchecked, Verdict
from any_agent.types import Message

LAW = Check(
    "parsing",
    "set model.renderer to this model's family; with this one agents would not get the model's "
    "answers",
)
_CASES = (
    ("text", probes.TEXT),
    ("reasoning", probes.REASONED),
    ("call", probes.CALLED),
    ("text and call", probes.TEXT_AND_CALL),
    ("two calls", probes.CALLED_TWICE),
)
_CUTS = (("truncated call", probes.CALLED), ("unclosed reasoning", probes.REASONED))
_STEPS = (1, 3, None)  # tokens per chunk; None for a single chunk


async def parsing(chat: ChatFormat, template: ReferenceTemplate) -> AsyncIterator[Verdict]:
    """Check each kind of answer, and answers whose end is missing."""
    for cases, cut in ((_CASES, False), (_CUTS, True)):
        for name, answer in cases:
            yield await LAW.judge(name, _check(answer, chat, template, cut=cut))


async def _check(
    answer: Message, chat: ChatFormat, template: ReferenceTemplate, *, cut: bool
) -> str:
    tools = probes.TOOLS if answer.get("tool_calls") else None
    if tools and not template.takes_tools:
        raise Declined(NO_TOOLS)
    then = probes.result(1, "3") if tools else probes.NEXT
    turn = template.turn([probes.USER], tools, answer, then)
    if turn.output.count("add") < len(answer.get("tool_calls", [])):
        few = "no calls" if "add" not in turn.output else "one call at a time"
        raise Unchecked(f"the template writes {few}")
    for field in ("reasoning_content", "content"):
        if answer.get(field, "") not in turn.output:
            raise Unchecked(f"the template leaves {field} out of such an answer")
    return await (_check_cut if cut else _check_whole)(turn, chat)


async def _check_whole(turn: TemplateTurn, chat: ChatFormat) -> str:
    message = await _parse(turn, turn.output_ids, chat)
    if isinstance(message, str):
        raise Failed(message)
    plain, answer = _plain(message), _plain(turn.answer)
    if plain == answer:
        return "read back as it was written, whole and streamed"
    if turn.tools and not message.get("tool_calls") and "add" in str(message["content"]):
        raise Declined("how this template writes calls is not known: they stay text")
    if plain["calls"] == answer["calls"] and plain["reasoning"] == answer["content"] != "":
        raise Declined("the template writes text beside a call as reasoning")
    raise Failed(f"{turn.output[:60]!r} is read as {json.dumps(plain)[:120]}")


async def _check_cut(turn: TemplateTurn, chat: ChatFormat) -> str:
    """Check that nothing is lost and nothing is made up, wherever the tokens run out."""
    ids = turn.output_ids
    lengths = range(1, len(ids), max(1, len(ids) // 12))
    for length in lengths:
        message = await _parse(turn, ids[:length], chat)
        if isinstance(message, str):
            raise Failed(f"cut after {length} tokens, {message}")
        for call in message.get("tool_calls") or []:
            if (name := call["function"]["name"]) != "add":
                raise Failed(f"cut after {length} tokens, a call of {name!r} is read")
    return f"read at {len(lengths)} cuts"


async def _parse(turn: TemplateTurn, ids: list[int], chat: ChatFormat) -> Message | str:
    """Return the message of the whole and the streamed answers, or how they differ."""
    message: Message | None = None
    for step in _STEPS:
        script = ScriptedConversation(chat, turn.tools)
        completion, deltas = await script.call(turn.messages, ids, step=step)
        message = completion.interaction.output_message
        streamed = merged(deltas)
        if _plain(streamed) != _plain(message) or streamed.get("content") != message["content"]:
            shown = json.dumps(_plain(streamed))[:80]
            return (
                f"a stream of {step or len(ids)} tokens per chunk gives {shown}, unlike the whole"
            )
    assert message is not None
    return message


def _plain(message: Message) -> dict[str, Any]:
    """Return a message without ids, space around text, and the spelling of arguments."""
    calls = [
        {"name": c["function"]["name"], "arguments": _decoded(c["function"]["arguments"])}
        for c in message.get("tool_calls") or []
    ]
    return {
        "content": (message.get("content") or "").strip(),
        "reasoning": (message.get("reasoning_content") or "").strip(),
        "calls": calls,
    }


def _decoded(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
