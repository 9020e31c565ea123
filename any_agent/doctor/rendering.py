"""Our ids are those of the model's own template."""

from __future__ import annotations

from collections.abc import AsyncIterator

from any_agent.chat import ChatFormat
from any_agent.chat import format_probes as probes
from any_agent.doctor.reference_template import (
    NO_TOOLS,
    OWN_ADVICE,
    ReferenceTemplate,
    TemplateRefused,
    without_thinking,
)
from any_agent.doctor.verdict import Check, Verdict
from any_agent.errors import AnyAgentError, InvalidRequest
from any_agent.types import Message, Tool

LAW = Check("rendering")
_DO = (
    "set model.renderer to this model's family, or to default for its own template; if "
    "chat_template was changed on purpose, default is right"
)
_ONLY_CALLS = (
    "the template shows calls but no tools: agents describe them in a message as well, and their "
    "calls are read"
)
_MOMENTS = 3
_SPACES: Message = {"role": "user", "content": "\n\n  a\t1 \u00e9\U0001f600 \u4e2d\r\nb  \n"}


async def rendering(chat: ChatFormat, template: ReferenceTemplate) -> AsyncIterator[Verdict]:
    """Of what agents send first, and of conversations rendered anew."""
    end = chat.decode(chat.stop_token_ids[:1])
    forged = {**probes.FORGED, "content": probes.FORGED["content"].replace("{end}", end)}
    p = probes
    cases: list[tuple[str, list[Message], list[Tool] | None]] = [
        ("user", [p.USER], None),
        ("system", [p.SYSTEM, p.USER], None),
        ("white space, Unicode", [_SPACES], None),
        ("special tokens in text", [forged], None),
        ("tools", [p.SYSTEM, p.USER], p.TOOLS),
        ("earlier answers", [p.SYSTEM, p.USER, p.TEXT, p.NEXT], None),
        ("earlier reasoning", [p.USER, p.REASONED, p.NEXT], None),
        ("tool result", [p.USER, p.CALLED, p.result(1, "3")], p.TOOLS),
        (
            "two tool results",
            [p.USER, p.CALLED_TWICE, p.result(1, "3"), p.result(2, "4")],
            p.TOOLS,
        ),
    ]
    for case, messages, tools in cases:
        if tools and not template.takes_tools:
            yield LAW.declined(case, NO_TOOLS)
            continue
        if case == "tools" and not template.shows_tools:
            yield LAW.declined(case, _ONLY_CALLS)
            continue
        verdict = _compare(case, chat, template, messages, tools)
        yield _forged(chat, template, messages, verdict) if messages == [forged] else verdict
    for case, on in (("thinking on", True), ("thinking off", False)):
        settings = {"enable_thinking": on}
        try:
            variant = chat.variant(settings)
        except InvalidRequest:
            yield LAW.unchecked(case, "the template has no such switch (enable_thinking)")
            continue
        yield _compare(
            case, variant, ReferenceTemplate(variant, settings), [p.SYSTEM, p.USER], None
        )


def _compare(
    case: str,
    chat: ChatFormat,
    template: ReferenceTemplate,
    messages: list[Message],
    tools: list[Tool] | None,
) -> Verdict:
    """A template may write the time, which goes on between two renderings."""
    for _ in range(_MOMENTS):
        try:
            before = template.text(messages, tools)
            verdict = _compare_now(case, chat, template, messages, tools)
            if not verdict.failed or template.text(messages, tools) == before:
                return verdict
        except TemplateRefused as error:
            return LAW.unchecked(case, str(error))
    return LAW.unchecked(case, "the template writes something else at every moment")


def _compare_now(
    case: str,
    chat: ChatFormat,
    template: ReferenceTemplate,
    messages: list[Message],
    tools: list[Tool] | None,
) -> Verdict:
    do = OWN_ADVICE if template.is_own else _DO
    try:
        own = template.ids(messages, tools)
    except TemplateRefused as error:
        return LAW.unchecked(case, str(error))
    try:
        ids = chat.render(messages, tools)
    except AnyAgentError as error:
        return LAW.failed(case, f"{chat.name} cannot render what the template can: {error}", do)
    if ids == own:
        return LAW.passed(case, f"{len(ids)} ids, as the template's")
    ours, theirs = chat.decode(ids), chat.decode(own)
    if ours == theirs:
        at = next(k for k, (a, b) in enumerate(zip(ids, own, strict=False)) if a != b)
        said = f"the template's text in other ids, first at {at}"
        if any(m["role"] == "assistant" for m in messages):
            # Sampled ids begin anew where a generation prompt ends; a template knows no such seam.
            return LAW.passed(case, said)
        return LAW.failed(case, said, do)
    if without_thinking(ours) == without_thinking(theirs):
        return LAW.passed(
            case, "as the template's, but earlier thinking is kept (model.thinking_retention)"
        )
    return LAW.failed(case, f"{chat.name} writes {_difference(ours, theirs)}", do)


def _forged(
    chat: ChatFormat, template: ReferenceTemplate, messages: list[Message], verdict: Verdict
) -> Verdict:
    """A template takes a text that spells its tokens for them; as plain text it forges nothing."""
    if not verdict.failed:
        return verdict
    ids, own = chat.render(messages, None), template.ids(messages, None)
    special = set(chat.tokenizer.all_special_ids) | set(chat.stop_token_ids)
    ours, theirs = chat.decode(ids), chat.decode(own)
    # A template may change what it takes for its own tokens; nobody's text is wrong for that.
    if (ours == theirs or messages[0]["content"] in ours) and (
        sum(i in special for i in ids) <= sum(i in special for i in own)
    ):
        return LAW.passed(verdict.case, "they stay text; the template would take them for tokens")
    return verdict


def _difference(ours: str, theirs: str) -> str:
    at = next((k for k, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if at is None:
        at = min(len(ours), len(theirs))
    at = max(0, at - 8)
    return f"{ours[at : at + 40]!r} where the template writes {theirs[at : at + 40]!r}"
