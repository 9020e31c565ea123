"""Thousands of random conversations: no drift where continuation is claimed.

The short form runs few of the long one's (``--long``: 10,000 sessions).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from tests.support.families import family
from tests.support.laws.cases import FAMILIES, label
from tests.support.laws.clients import CLIENTS, echo
from tests.support.laws.talk import Session, Tally
from tests.support.results import FIGURE

CALLS = 8
SHORT, LONG = 32, 912
"""Sessions of each family."""
MEDDLER = "meddler"
"""It echoes, and says something else about the past now and then: its share is no promise."""
CLAIMED = {"qwen3": 0.95, "llama3": 0.95}
"""The least share of exact continuations when clients send back what they got."""


@pytest.mark.parametrize("case", FAMILIES, ids=label)
async def test_continuation_never_drifts(
    case: tuple[str, bool],
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    name, thinking = case
    fam = family(name, thinking=thinking)
    sessions = LONG if request.config.getoption("--long") else SHORT
    tallies = {client: Tally() for client in (*CLIENTS, MEDDLER)}
    for number in range(sessions):
        client = list(tallies)[number % len(tallies)]
        how = CLIENTS.get(client, echo)
        seed = f"{name} {thinking} {number}"
        session = Session(fam, how, seed, tallies[client], meddles=client == MEDDLER)
        await session.run(CALLS)
    for client, tally in tallies.items():
        assert tally.expected > 2 * sessions / len(tallies)
        least = CLAIMED.get(name, 0.0) if client == "echo" else 0.0
        assert tally.share >= least, (client, tally)
    shares = ", ".join(f"{client} {tally.share:.1%}" for client, tally in tallies.items())
    calls = sum(tally.calls for tally in tallies.values())
    reasons = sum((tally.reasons for tally in tallies.values()), Counter[str]())
    record_property(FIGURE, f"{label(case)}: {sessions} sessions, {calls} calls, 0 drift; {shares}")
    record_property(FIGURE, f"{label(case)}: not continued: {dict(reasons)}")
