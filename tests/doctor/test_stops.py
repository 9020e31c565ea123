"""How outputs end is seen of a model that was trained to answer in a word, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from any_agent.chat import ChatFormat
from any_agent.chat import format_probes as probes
from any_agent.doctor.engine import stops
from any_agent.doctor.verdict import CheckOutcome
from any_agent.engine.sglang.probe import EngineReply


class Brief:
    """An engine whose model says a few ids, and then ends its turn, again and again."""

    def __init__(self, chat: ChatFormat, said: str) -> None:
        self._chat = chat
        self._said = chat.encode(said, special=False)

    async def ask(self, ids: Sequence[int], *, max_new_tokens: int, **sampling: Any) -> EngineReply:
        end = self._chat.stop_token_ids[0]
        out: list[int] = []
        reason, matched = "length", None
        while len(out) < max_new_tokens:
            out.append((self._said + [end] * max_new_tokens)[len(out)])
            strings = [s for s in sampling.get("stop", ()) if s in self._chat.decode(out)]
            if strings or out[-1] in sampling.get("stop_token_ids", ()):
                reason, matched = "stop", strings[0] if strings else out[-1]
                break
            if out[-1] == end and not sampling.get("ignore_eos"):
                reason, matched = "stop", end
                break
        return EngineReply(out, [0.0] * len(out), [0] * len(out), None, len(ids), reason, matched)


async def outcomes(chat: ChatFormat, said: str) -> list[CheckOutcome]:
    asker: Any = Brief(chat, said)
    prompt = chat.render([probes.USER], None)
    return [verdict.outcome async for verdict in stops(asker, chat, prompt)]


async def test_an_answer_of_one_word_passes_the_checks_of_ends(chat: ChatFormat) -> None:
    assert await outcomes(chat, "3") == [CheckOutcome.PASSED] * 3
    assert await outcomes(chat, "It is three, as one and two are.") == [CheckOutcome.PASSED] * 3


async def test_without_an_answer_the_ends_stay_unchecked(chat: ChatFormat) -> None:
    assert await outcomes(chat, "") == [
        CheckOutcome.PASSED,
        CheckOutcome.UNCHECKED,
        CheckOutcome.UNCHECKED,
    ]
