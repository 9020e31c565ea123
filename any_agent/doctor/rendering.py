"""The law that our token ids are those of the model's own template."""

from __future__ import annotations

from collections.abc import AsyncIterator

from any_agent.chat import ChatFormat
from any_agent.chat import format_probes as probes
from any_agent.doctor.reference_template import (
    NO_TOOLS,
    ReferenceTemplate,
    TemplateRefused,
    without_thinking,
)
from any_agent.doctor.verdict import Check, Verdict
from any_agent.errors import AnyAgentError, InvalidRequest
from any_agent.types import Message, Tool

LAW = Check(
    "rendering",
    "set model.renderer to this model's family, or to default for its own template; if "
    "chat_template was changed on purpose, default is right",
)
_ONLY_CALLS = (
    "the template shows calls but no tools: agents describe them in a message as well, and their "
    "calls are read"
)
_TRIES = 3
_SPACES: Message = {"role": "user", "content": "\n\n  a\t1 \u00e9\U0001f600 \u4e2d\r\nb  \n"}


async def rendering(chat: ChatFormat, template: ReferenceTemplate) -> AsyncIterator[Verdict]:
    """Compare first turns, and conversations that are rendered anew."""
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
        if verdict.failed and messages == [forged] and _stays_text(chat, template, messages):
            seen = "they stay text; the template would take them for tokens"
            verdict = LAW.passed(case, seen)
        yield verdict
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
    """Compare both renderings; repeat if the template writes the time, which may change."""
    for _ in range(_TRIES):
        try:
            before = template.text(messages, tools)
            verdict = _compare_once(case, chat, template, messages, tools)
            if not verdict.failed or template.text(messages, tools) == before:
                return verdict
        except TemplateRefused as error:
            return LAW.unchecked(case, str(error))
    return LAW.unchecked(case, "the template writes another text each time")


def _compare_once(
    case: str,
    chat: ChatFormat,
    template: ReferenceTemplate,
    messages: list[Message],
    tools: list[Tool] | None,
) -> Verdict:
    do = template.advice(LAW.do)
    own = template.ids(messages, tools)
    try:
        ids = chat.render(messages, tools)
    except AnyAgentError as error:
        return LAW.failed(case, f"{chat.name} cannot render what the template can: {error}", do)
    if ids == own:
        return LAW.passed(case, f"{len(ids)} ids, as the template's")
    ours, theirs = chat.decode(ids), chat.decode(own)
    if ours == theirs:
        at = next(k for k, (a, b) in enumerate(zip(ids, own, strict=False)) if a != b)
        seen = f"the template's text in other ids, first at {at}"
        if any(m["role"] == "assistant" for m in messages):
            # We tokenize an answer apart from its generation prompt; a template does not.
            return LAW.passed(case, seen)
        return LAW.failed(case, seen, do)
    if without_thinking(ours) == without_thinking(theirs):
        return LAW.passed(
            case, "as the template's, but earlier thinking is kept (model.thinking_retention)"
        )
    return LAW.failed(case, f"{chat.name} writes {_difference(ours, theirs)}", do)


def _stays_text(chat: ChatFormat, template: ReferenceTemplate, messages: list[Message]) -> bool:
    """Tell whether a text that spells special tokens forges none; a template may read tokens."""
    ids, own = chat.render(messages, None), template.ids(messages, None)
    special = set(chat.tokenizer.all_special_ids) | set(chat.stop_token_ids)
    ours, theirs = chat.decode(ids), chat.decode(own)
    # A template may also rewrite the text that it takes for its own tokens.
    return (ours == theirs or messages[0]["content"] in ours) and (
        sum(i in special for i in ids) <= sum(i in special for i in own)
    )


def _difference(ours: str, theirs: str) -> str:
    pairs = enumerate(zip(ours, theirs, strict=False))
    at = next((k for k, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
    at = max(0, at - 8)
    return f"{ours[at : at + 40]!r} where the template writes {theirs[at : at + 40]!r}"
