"""Hundreds of turns of one session, for each family: nothing drifts, nothing is rendered anew.

The short form goes so far with one family, and with the others a part of the way.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from any_agent.types import Continuation, Message
from tests.support.families import Call, family
from tests.support.laws.apis import results_of
from tests.support.laws.cases import FAMILIES, label
from tests.support.laws.record import check_session
from tests.support.laws.service import lab_of
from tests.support.laws.talk import TOOLS

TURNS, FEW = 200, 30
FAR = ("qwen3", True)
ASK: Message = {"role": "user", "content": "What is 1 + 2?"}


@pytest.mark.parametrize("case", FAMILIES, ids=label)
async def test_every_turn_of_a_long_talk_continues_exactly(
    tmp_path: Path, case: tuple[str, bool], request: pytest.FixtureRequest
) -> None:
    name, thinking = case
    turns = TURNS if case == FAR or request.config.getoption("--long") else FEW
    fam = family(name, thinking=thinking)
    fields: dict[str, Any] = {"tools": TOOLS} if fam.spec.calls else {}
    # A model's pass over each of the contexts would take minutes.
    async with lab_of(fam, tmp_path, true=False, context=1 << 16) as lab:
        talk, messages = await lab.open(), [ASK]
        for turn in range(turns):
            calls = (Call("add", {"a": turn}),) if fam.spec.calls and turn % 3 == 1 else ()
            said = fam.say("" if calls else f"turn {turn}", calls=calls)
            (answer,) = await talk.ask(messages, said, stream=turn % 2 == 0, **fields)
            messages += [answer, *(results_of(answer, str(turn)) or [ASK])]
        await talk.end()
        tree = await check_session(lab, talk, each=turns // 10)
    assert len(tree) == turns and sum(not tree.children(n.id) for n in tree) == 1
    assert sum(n.continuation is Continuation.EXACT for n in tree) == turns - 1
