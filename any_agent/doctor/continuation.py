"""The law that the next turn's prompt keeps the sampled ids and continues as the template would."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from any_agent.chat import ChatFormat
from any_agent.chat import format_probes as probes
from any_agent.doctor.reference_template import (
    NO_TOOLS,
    ReferenceTemplate,
    TemplateRefused,
    without_thinking,
)
from any_agent.doctor.scripted_conversation import ScriptedConversation
from any_agent.doctor.verdict import Check, Declined, Failed, Verdict
from any_agent.types import Continuation, Message, Tool

LAW = Check(
    "continuation",
    "this renderer cannot continue this template exactly: set model.renderer to default, or to "
    "this model's family",
)


@dataclass(frozen=True, slots=True)
class _Case:
    name: str
    answer: Message
    new: tuple[Message, ...]
    tools: list[Tool] | None = None
    cut: bool = False
    """The answer ran out of tokens, so its end is missing."""


_CASES = (
    _Case("after text", probes.TEXT, (probes.NEXT,)),
    _Case("after truncation", probes.TEXT, (probes.NEXT,), cut=True),
    _Case("after a call", probes.CALLED, (probes.result(1, "3"),), probes.TOOLS),
    _Case(
        "after two calls",
        probes.CALLED_TWICE,
        (probes.result(1, "3"), probes.result(2, "4")),
        probes.TOOLS,
    ),
    _Case("after reasoning", probes.REASONED, (probes.NEXT,)),
)


async def continuation(chat: ChatFormat, template: ReferenceTemplate) -> AsyncIterator[Verdict]:
    """Check each kind of answer: its continuation is exact, or declined with the reason."""
    for case in _CASES:
        yield await LAW.judge(case.name, _continue(case, chat, template), template.advice(LAW.do))


async def _continue(case: _Case, chat: ChatFormat, template: ReferenceTemplate) -> str:
    if case.tools and not template.takes_tools:
        raise Declined(NO_TOOLS)
    first = [probes.SYSTEM, probes.USER]
    try:
        template.text(first, case.tools)
    except TemplateRefused:
        first = [probes.USER]
    # An agent cannot send what the template refuses.
    template.text([*first, case.answer, *case.new], case.tools)
    turn = template.turn(first, case.tools, case.answer, case.new[0])
    output = turn.output_ids[: len(turn.output_ids) // 2] if case.cut else turn.output_ids
    script = ScriptedConversation(chat, case.tools)
    one, _ = await script.call(first, output)
    answer = one.interaction.output_message
    two, _ = await script.call([*first, answer, *case.new], turn.output_ids)
    child = two.interaction
    if child.continuation is not Continuation.EXACT:
        raise Declined(f"rendered anew: {child.branch_reason}")
    before = [*script.tree.prompt_ids(one.interaction.id).tolist(), *output]
    ids = script.tree.prompt_ids(child.id).tolist()
    if ids[: len(before)] != before:
        raise Failed("the next prompt does not begin with the sampled ids")
    # The template must write the same text after the sampled ids.
    suffix = ids[len(before) :]
    text = chat.decode(output)
    answer = {**case.answer, "content": text.strip()} if case.cut else case.answer
    whole = template.text([*first, answer, *case.new], case.tools)
    added = chat.decode(suffix)
    if case.cut and suffix[0] in chat.stop_token_ids and not whole.endswith(added):
        # A template never writes the missing end; the rest is the template's.
        added = chat.decode(suffix[1:])
    if not whole.endswith(added):
        theirs = whole[-len(added) :]
        raise Failed(
            f"the renderer continues with {added[:60]!r}, the template with {theirs[:60]!r}"
        )
    seen = f"exact: the sampled ids, then {len(suffix)} new ones as the template's"
    head = whole[: len(whole) - len(added)]
    if not case.cut and not head.endswith(text):
        kept = head.endswith(without_thinking(text))
        seen += "; reasoning is kept" if kept else "; the template would rewrite the answer"
    return seen
