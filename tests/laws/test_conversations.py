"""Thousands of random conversations: no drift where continuation is claimed.

The short form runs a tenth of the long one's (``--long``: 10,000 sessions).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from tests.conftest import FIGURE
from tests.families import family
from tests.laws.clients import CLIENTS
from tests.laws.talk import Session, Tally

FAMILIES = [
    ("qwen3", False),
    ("qwen3", True),
    ("qwen3_5", True),
    ("llama3", False),
    ("glm", False),
    ("glm", True),
    ("deepseek", False),
    ("deepseek_r1", False),
    ("gpt_oss", False),
    ("unknown", False),
    ("unknown_plain", False),
]
CALLS = 8
SHORT, LONG = 98, 910
"""Sessions of each family."""
CLAIMED = {"qwen3": 0.95, "llama3": 0.95}
"""The least share of exact continuations when clients send back what they got."""


@pytest.mark.parametrize(("name", "thinking"), FAMILIES)
async def test_continuation_never_drifts(
    name: str,
    thinking: bool,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    fam = family(name, thinking=thinking)
    sessions = LONG if request.config.getoption("--long") else SHORT
    tallies = {client: Tally() for client in CLIENTS}
    for number in range(sessions):
        client = list(CLIENTS)[number % len(CLIENTS)]
        seed = f"{name} {thinking} {number}"
        await Session(fam, CLIENTS[client], seed, tallies[client]).run(CALLS)
    label = f"{name}{' thinking' if thinking else ''}"
    for client, tally in tallies.items():
        assert tally.expected > 20
        least = CLAIMED.get(name, 0.0) if client == "echo" else 0.0
        assert tally.share >= least, (client, tally)
    shares = ", ".join(f"{client} {tally.share:.1%}" for client, tally in tallies.items())
    calls = sum(tally.calls for tally in tallies.values())
    reasons = sum((tally.reasons for tally in tallies.values()), Counter[str]())
    record_property(FIGURE, f"{label}: {sessions} sessions, {calls} calls, 0 drift; {shares}")
    record_property(FIGURE, f"{label}: not continued: {dict(reasons)}")
