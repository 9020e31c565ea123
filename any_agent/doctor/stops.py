"""An output ends where it must, with what was sampled before the end kept whole."""

from __future__ import annotations

from collections.abc import AsyncIterator

from any_agent.chat import ChatFormat
from any_agent.doctor.verdict import Check, Verdict
from any_agent.engine.sglang.probe import EngineProbe

LAW = Check("stops")
DO = "update the engine: this one ends outputs elsewhere than SGLang's contract says"
_TOKENS = 24
_PROMPTS = 4


async def stops(asker: EngineProbe, chat: ChatFormat, prompt: list[int]) -> AsyncIterator[Verdict]:
    """By length, by a stop string and by a stop token, each with its reason."""
    free = await asker.ask(prompt, max_new_tokens=_TOKENS, temperature=0, ignore_eos=True)
    if (len(free.ids), free.reason) == (_TOKENS, "length"):
        yield LAW.passed("length", f"after {_TOKENS} tokens, as asked for")
    else:
        seen = f"{len(free.ids)} tokens ({free.reason}), where {_TOKENS} were asked for"
        yield LAW.failed("length", seen, DO)
    prompt, said = await _said(asker, chat, prompt)
    yield await _string(asker, chat, prompt, said)
    yield await _token(asker, prompt, said)


async def _said(
    asker: EngineProbe, chat: ChatFormat, prompt: list[int]
) -> tuple[list[int], list[int]]:
    """A prompt, and what the model says to it before it ends its answer: a few tokens at least.

    To less of a prompt a model that was trained says more than the one word of its answer.
    """
    ends = set(chat.stop_token_ids)
    most: tuple[list[int], list[int]] = (prompt, [])
    for length in range(len(prompt), max(0, len(prompt) - _PROMPTS), -1):
        answer = await asker.ask(
            prompt[:length], max_new_tokens=_TOKENS, temperature=0, ignore_eos=True
        )
        end = next((k for k, i in enumerate(answer.ids) if i in ends), len(answer.ids))
        if end > len(most[1]):
            most = prompt[:length], answer.ids[:end]
        if end >= _TOKENS // 2:
            break
    return most


async def _string(
    asker: EngineProbe, chat: ChatFormat, prompt: list[int], said: list[int]
) -> Verdict:
    stop = _stop_of(chat.decode(said))
    if stop is None:
        return LAW.unchecked("stop string", "the model's answers have no text that could end them")
    got = await asker.ask(
        prompt, max_new_tokens=_TOKENS, temperature=0, ignore_eos=True, stop=(stop,)
    )
    text, before = chat.decode(got.ids), chat.decode(got.ids[:-1])
    if got.reason == "length" and stop not in text:
        return LAW.unchecked("stop string", f"{stop!r} was not sampled a second time")
    if got.reason != "stop" or got.matched != stop:
        seen = f"{stop!r} was sampled, and the end is {got.reason} ({got.matched!r})"
        return LAW.failed("stop string", seen, DO)
    if stop not in text:
        seen = f"the ids are cut before {stop!r}: what was sampled is not told whole"
        return LAW.failed("stop string", seen, DO)
    if stop in before:
        return LAW.failed("stop string", f"the output goes on behind {stop!r}", DO)
    shown = "" if got.text is None else ", its text cut" * (stop not in got.text)
    return LAW.passed("stop string", f"at the token that completes {stop!r}{shown}")


def _stop_of(text: str) -> str | None:
    """Some characters from the middle that nothing before them spells."""
    for length in (3, 2, 1):
        for at in range(len(text) // 3, len(text) - length + 1):
            part = text[at : at + length]
            plain = part.isprintable() and part.strip() == part
            # Special tokens have no text in an engine that skips them.
            if plain and not set(part) & set("<>\ufffd") and text.find(part) == at:
                return part
    return None


async def _token(asker: EngineProbe, prompt: list[int], said: list[int]) -> Verdict:
    if not said:
        return LAW.unchecked("stop token", "the model ends its answers at once")
    later = said[len(said) // 3 :]
    stop = next((i for i in later if i not in said[: len(said) // 3]), said[0])
    got = await asker.ask(prompt, max_new_tokens=_TOKENS, temperature=0, stop_token_ids=(stop,))
    if got.reason == "length" and stop not in got.ids:
        return LAW.unchecked("stop token", f"{stop} was not sampled a second time")
    if got.reason == "stop" and got.matched != stop and stop not in got.ids:
        return LAW.unchecked("stop token", "the model ended its answer before")
    if got.reason == "stop" and got.ids[-1:] == [stop] and got.ids.count(stop) == 1:
        return LAW.passed("stop token", f"at {stop}, which is kept")
    seen = f"{stop} was to end the output, which is {got.ids[-4:]} at its end ({got.reason})"
    return LAW.failed("stop token", seen, DO)
