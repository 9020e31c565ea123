"""The engine's tokenizer is the one that prompts are made with."""

from __future__ import annotations

from collections.abc import AsyncIterator

from any_agent.chat import ChatFormat
from any_agent.doctor.verdict import Check, Verdict
from any_agent.engine.sglang.probe import EngineProbe, EngineReply

LAW = Check("tokenizer")
DO = "start the engine with the tokenizer of model.path (SGLang: --tokenizer-path)"
_TOKENS = 48


async def tokenizer(
    asker: EngineProbe, chat: ChatFormat, prompt: list[int]
) -> AsyncIterator[Verdict]:
    """Its text of sampled ids is ours; it has an embedding for each of our ids."""
    answer = await asker.ask(prompt, max_new_tokens=_TOKENS, ignore_eos=True)
    yield _text(answer, chat)
    info = {**await asker.server_info(), **await asker.model_info()}
    told = info.get("vocab_size")
    if not isinstance(told, int):
        yield LAW.unchecked("vocabulary", "the engine does not say how large its vocabulary is")
    elif told < chat.vocab_size:
        said = f"{chat.vocab_size} ids here, and the engine knows {told}"
        yield LAW.failed("vocabulary", said, DO)
    else:
        yield LAW.passed("vocabulary", f"{chat.vocab_size} ids here, the engine knows {told}")


def _text(answer: EngineReply, chat: ChatFormat) -> Verdict:
    if not answer.text:
        return LAW.unchecked("text", "the engine tells no text")
    if any(i >= chat.vocab_size for i in answer.ids):
        # Rows of padding that a trained model never samples, and a random one does.
        known = [i for i in answer.ids if i < chat.vocab_size]
        if len(known) < len(answer.ids) // 2:
            return LAW.failed("text", "the engine samples ids that are unknown here", DO)
        return LAW.unchecked("text", "ids beyond the vocabulary were sampled")
    ours = [
        str(chat.tokenizer.decode(answer.ids, skip_special_tokens=skip)) for skip in (True, False)
    ]
    # A stream's last character may be incomplete, and white space at a seam is the decoder's own.
    if any(_alike(answer.text, text) for text in ours):
        return LAW.passed("text", f"{len(answer.ids)} sampled ids spell the same here and there")
    said = f"{answer.ids[:6]}... is {ours[1][:32]!r} here, and {answer.text[:32]!r} there"
    return LAW.failed("text", said, DO)


def _alike(one: str, other: str) -> bool:
    return one.strip().rstrip("\ufffd") == other.strip().rstrip("\ufffd")
