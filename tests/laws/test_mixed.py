"""Random conversations over Responses, Messages and all APIs: no drift where continuation is
claimed, and streams that come to what the whole answer says.

The short form runs few of the long one's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from tests.support.families import family
from tests.support.laws.cases import FAMILIES, label
from tests.support.laws.mixed import HABITS, MixedSession
from tests.support.laws.talk import Tally
from tests.support.results import FIGURE

CALLS = 8
SHORT, LONG = 12, 600
"""Sessions of each family."""
MEDDLER = "meddler"
"""It speaks all APIs, and says something else about the past now and then."""
CLAIMED = {"qwen3": 0.95, "llama3": 0.95}
"""The least share of exact continuations when clients send back what they got."""


@pytest.mark.parametrize("case", FAMILIES, ids=label)
async def test_nothing_drifts_and_streams_say_what_whole_answers_do(
    case: tuple[str, bool],
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    name, thinking = case
    fam = family(name, thinking=thinking)
    sessions = LONG if request.config.getoption("--long") else SHORT
    tallies = {habit: Tally() for habit in (*HABITS, MEDDLER)}
    for number in range(sessions):
        habit = list(tallies)[number % len(tallies)]
        how, meddles = ("all", True) if habit == MEDDLER else (habit, False)
        seed = f"{name} {thinking} {number} of the APIs"
        session = MixedSession(fam, how, seed, tallies[habit], meddles=meddles)
        await session.run(CALLS)
    honest = [tallies[habit] for habit in HABITS]
    share = sum(t.exact for t in honest) / sum(t.expected for t in honest)
    assert share >= CLAIMED.get(name, 0.0), tallies
    shares = ", ".join(f"{habit} {tally.share:.1%}" for habit, tally in tallies.items())
    calls = sum(tally.calls for tally in tallies.values())
    reasons = sum((tally.reasons for tally in tallies.values()), Counter[str]())
    record_property(FIGURE, f"{label(case)}: {sessions} sessions, {calls} calls, 0 drift; {shares}")
    record_property(FIGURE, f"{label(case)}: not continued: {dict(reasons)}")
