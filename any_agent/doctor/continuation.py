"""A next turn's prompt begins with all that was sampled, and goes on as the template would."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from any_agent.chat import ChatFormat
from any_agent.chat import format_probes as probes
from any_agent.doctor.reference_template import (
    NO_TOOLS,
    OWN_ADVICE,
    ReferenceTemplate,
    TemplateRefused,
    without_thinking,
)
from any_agent.doctor.scripted_conversation import ScriptedConversation
from any_agent.doctor.verdict import Check, Verdict
from any_agent.errors import AnyAgentError
from any_agent.types import Continuation, Message, Tool

LAW = Check("continuation")
_DO = (
    "this template cannot be continued exactly by this renderer: set model.renderer to default, "
    "or to this model's family"
)


@dataclass(frozen=True, slots=True)
class _Case:
    name: str
    answer: Message
    new: tuple[Message, ...]
    tools: list[Tool] | None = None
    cut: bool = False
    """The answer's end is missing, as when its tokens ran out."""


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
    """After each kind of answer: claimed, and then exact, or declined with the reason."""
    do = _do(template)
    for case in _CASES:
        if case.tools and not template.takes_tools:
            yield LAW.declined(case.name, NO_TOOLS)
            continue
        try:
            yield await _continue(case, chat, template)
        except TemplateRefused as error:
            yield LAW.unchecked(case.name, str(error))
        except AnyAgentError as error:
            yield LAW.failed(case.name, error.message, do)


def _do(template: ReferenceTemplate) -> str:
    return OWN_ADVICE if template.is_own else _DO


async def _continue(case: _Case, chat: ChatFormat, template: ReferenceTemplate) -> Verdict:
    first = [probes.SYSTEM, probes.USER]
    try:
        template.text(first, case.tools)
    except TemplateRefused:
        first = [probes.USER]
    # What the template refuses no agent can send, whoever writes it.
    template.text([*first, case.answer, *case.new], case.tools)
    turn = template.turn(first, case.tools, case.answer, case.new[0])
    output = turn.output_ids[: len(turn.output_ids) // 2] if case.cut else turn.output_ids
    rehearsal = ScriptedConversation(chat, case.tools)
    one, _ = await rehearsal.call(first, output)
    said = one.interaction.output_message
    two, _ = await rehearsal.call([*first, said, *case.new], turn.output_ids)
    child = two.interaction
    if child.continuation is not Continuation.EXACT:
        return LAW.declined(case.name, f"rendered anew: {child.branch_reason}")
    before = [*rehearsal.tree.prompt_ids(one.interaction.id).tolist(), *output]
    ids = rehearsal.tree.prompt_ids(child.id).tolist()
    if ids[: len(before)] != before:
        return LAW.failed(
            case.name, "the next prompt does not begin with what was sampled", _do(template)
        )
    return _as_the_template(case, chat, template, first, output, ids[len(before) :])


def _as_the_template(
    case: _Case,
    chat: ChatFormat,
    template: ReferenceTemplate,
    first: list[Message],
    output: list[int],
    suffix: list[int],
) -> Verdict:
    """Whether what follows the sampled ids is what the template writes there."""
    said = chat.decode(output)
    answer = {**case.answer, "content": said.strip()} if case.cut else case.answer
    whole = template.text([*first, answer, *case.new], case.tools)
    added = chat.decode(suffix)
    if case.cut and suffix[0] in chat.stop_token_ids and not whole.endswith(added):
        # No template writes an end that is missing; what comes behind it is the template's.
        added = chat.decode(suffix[1:])
    if not whole.endswith(added):
        theirs = whole[-len(added) :]
        seen = f"then {added[:60]!r} is written, by the template {theirs[:60]!r}"
        return LAW.failed(case.name, seen, _do(template))
    seen = f"exact: the sampled ids, then {len(suffix)} new ones as the template's"
    head = whole[: len(whole) - len(added)]
    if not case.cut and not head.endswith(said):
        kept = head.endswith(without_thinking(said))
        seen += "; reasoning is kept" if kept else "; the template would rewrite the answer"
    return LAW.passed(case.name, seen)
