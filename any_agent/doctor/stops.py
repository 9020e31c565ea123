"""An output ends where it must, with what was sampled before the end kept whole."""

from __future__ import annotations

from collections.abc import AsyncIterator

from any_agent.chat import ChatFormat
from any_agent.doctor.asking import Answer, Asker
from any_agent.doctor.verdict import Law, Verdict

LAW = Law("stops")
DO = "update the engine: this one ends outputs elsewhere than SGLang's contract says"
_TOKENS = 24


async def stops(asker: Asker, chat: ChatFormat, prompt: list[int]) -> AsyncIterator[Verdict]:
    """By length, by a stop string and by a stop token, each with its reason."""
    free = await asker.ask(prompt, max_new_tokens=_TOKENS, temperature=0, ignore_eos=True)
    if (len(free.ids), free.reason) == (_TOKENS, "length"):
        yield LAW.passed("length", f"after {_TOKENS} tokens, as asked for")
    else:
        said = f"{len(free.ids)} tokens ({free.reason}), where {_TOKENS} were asked for"
        yield LAW.failed("length", said, DO)
    yield await _string(asker, chat, prompt, free)
    yield await _token(asker, prompt, free)


async def _string(asker: Asker, chat: ChatFormat, prompt: list[int], free: Answer) -> Verdict:
    stop = _stop_of(chat.decode(free.ids))
    if stop is None:
        return LAW.unchecked("stop string", "nothing that can be told apart was sampled")
    got = await asker.ask(
        prompt, max_new_tokens=_TOKENS, temperature=0, ignore_eos=True, stop=(stop,)
    )
    text, before = chat.decode(got.ids), chat.decode(got.ids[:-1])
    if got.reason == "length" and stop not in text:
        return LAW.unchecked("stop string", f"{stop!r} was not sampled a second time")
    if got.reason != "stop" or got.matched != stop:
        said = f"{stop!r} was sampled, and the end is {got.reason} ({got.matched!r})"
        return LAW.failed("stop string", said, DO)
    if stop not in text:
        said = f"the ids are cut before {stop!r}: what was sampled is not told whole"
        return LAW.failed("stop string", said, DO)
    if stop in before:
        return LAW.failed("stop string", f"the output goes on behind {stop!r}", DO)
    shown = "" if got.text is None else ", its text cut" * (stop not in got.text)
    return LAW.passed("stop string", f"at the token that completes {stop!r}{shown}")


def _stop_of(text: str) -> str | None:
    """Some characters from the middle that nothing before them spells."""
    for length in (3, 2, 1):
        for at in range(len(text) // 3, len(text) - length):
            part = text[at : at + length]
            plain = part.isprintable() and part.strip() == part
            # Special tokens have no text in an engine that skips them.
            if plain and not set(part) & set("<>\ufffd") and text.find(part) == at:
                return part
    return None


async def _token(asker: Asker, prompt: list[int], free: Answer) -> Verdict:
    stop = next((i for i in free.ids[_TOKENS // 3 :] if i not in free.ids[: _TOKENS // 3]), None)
    if stop is None:
        return LAW.unchecked("stop token", "the same few tokens were sampled over and over")
    got = await asker.ask(prompt, max_new_tokens=_TOKENS, temperature=0, stop_token_ids=(stop,))
    if got.reason == "length" and stop not in got.ids:
        return LAW.unchecked("stop token", f"{stop} was not sampled a second time")
    if got.reason == "stop" and got.matched != stop and stop not in got.ids:
        return LAW.unchecked("stop token", "the model ended its answer before")
    if got.reason == "stop" and got.ids[-1:] == [stop] and got.ids.count(stop) == 1:
        return LAW.passed("stop token", f"at {stop}, which is kept")
    said = f"{stop} was to end the output, which is {got.ids[-4:]} at its end ({got.reason})"
    return LAW.failed("stop token", said, DO)
