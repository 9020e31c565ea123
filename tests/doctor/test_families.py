"""The laws of the chat format hold for every family in miniature, as the service loads it."""

from __future__ import annotations

import pytest

from any_agent.doctor.startup_check import chat_laws
from any_agent.doctor.verdict import CheckOutcome, broken
from tests.support.families import family, names


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("name", names())
async def test_each_family_of_models_breaks_no_law_of_the_chat_format(
    name: str, thinking: bool
) -> None:
    made = family(name, thinking=thinking)
    settings = {"enable_thinking": made.thinking} if made.spec.enable_thinking else {}
    verdicts = await chat_laws(made.load(), settings)
    assert not broken(verdicts)
    claimed = [v for v in verdicts if v.law == "continuation" and v.outcome is CheckOutcome.PASSED]
    assert len(claimed) >= 2
