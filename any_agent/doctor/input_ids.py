"""The engine reads the very ids that it is sent, all of them."""

from __future__ import annotations

from collections.abc import AsyncIterator

from any_agent.doctor.verdict import Check, Verdict
from any_agent.engine.sglang.probe import EngineProbe
from any_agent.errors import ConfigError, InvalidRequest

LAW = Check("input")
DO = (
    "start the engine so that it refuses what it cannot read whole (SGLang: without "
    "--allow-auto-truncate), or set engine.context_length to what it reads"
)
_LONG = 8192
_LONGEST = 1 << 18


async def input_ids(
    asker: EngineProbe, prompt: list[int], configured: int | None
) -> AsyncIterator[Verdict]:
    """A short prompt, a long one, and one too long for the context."""
    for case, ids in (("short prompt", prompt), ("long prompt", [])):
        if case == "long prompt":
            try:
                context = await asker.engine.context_length()
            except ConfigError as error:
                if configured is None:
                    yield LAW.failed("context length", error.message, "set engine.context_length")
                    return
                context = configured
            if configured is not None and configured > context:
                said = f"engine.context_length is {configured}, the engine's is {context}"
                yield LAW.failed("context length", said, f"set engine.context_length={context}")
            ids = _repeated(prompt, min(context - 8, _LONG))
        answer = await asker.ask(ids, strict=False, max_new_tokens=1)
        if answer.prompt_tokens is None:
            yield LAW.failed(case, "the engine does not say how many ids it has read", DO)
        elif answer.prompt_tokens != len(ids):
            said = f"the engine has read {answer.prompt_tokens} of {len(ids)} ids"
            yield LAW.failed(case, f"{said}: it truncates prompts, or adds to them", DO)
        else:
            yield LAW.passed(case, f"{len(ids)} ids sent, {len(ids)} read")
    yield await _too_long(asker, prompt, context)


async def _too_long(asker: EngineProbe, prompt: list[int], context: int) -> Verdict:
    case, count = "too long a prompt", context + 16
    if count > _LONGEST:
        return LAW.unchecked(case, f"a context of {context} tokens is too much to ask for")
    try:
        answer = await asker.ask(_repeated(prompt, count), strict=False, max_new_tokens=1)
    except InvalidRequest:
        return LAW.passed(case, f"{count} ids are refused, where the context has {context}")
    said = (
        f"the engine answers to {count} ids, where its context has {context}: "
        f"it has read {answer.prompt_tokens}"
    )
    return LAW.failed(case, said, DO)


def _repeated(ids: list[int], count: int) -> list[int]:
    return (ids * (count // len(ids) + 1))[:count]
