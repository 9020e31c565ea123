"""Random conversations over each API and over all: no drift where continuation is claimed, and
streams that come to what the whole answer says.

The short form runs few of the long one's (``--long``: 10,000 sessions of chat).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import pytest

from tests.support.families import family
from tests.support.laws.apis import APIS, CHAT, MESSAGES, RESPONSES, Api
from tests.support.laws.cases import FAMILIES, label
from tests.support.laws.clients import CLIENTS, echo
from tests.support.laws.talk import Session, Tally
from tests.support.results import FIGURE

CALLS = 8
SHORT, LONG = {"chat": 32, "apis": 12}, {"chat": 912, "apis": 600}
"""Sessions of each family."""
HABITS: dict[str, tuple[Api, ...]] = {
    "responses": (RESPONSES,),
    "named": (RESPONSES,),
    "messages": (MESSAGES,),
    "two": (RESPONSES, MESSAGES),
    "all": APIS,
}
"""The APIs that an agent speaks; ``named``: it names the answer before, where it can."""
MEDDLER = "meddler"
"""It says something else about the past now and then: its share is no promise."""
CLAIMED = {"qwen3": 0.95, "llama3": 0.95}
"""The least share of exact continuations when clients send back what they got."""


@pytest.mark.parametrize("case", FAMILIES, ids=label)
@pytest.mark.parametrize("spoken", ["chat", "apis"])
async def test_no_token_drifts_where_continuation_is_claimed(
    spoken: str,
    case: tuple[str, bool],
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    """Chat by clients that spell what they send back as frameworks do; the APIs by habit."""
    name, thinking = case
    fam = family(name, thinking=thinking)
    sessions = (LONG if request.config.getoption("--long") else SHORT)[spoken]
    kinds: Iterable[str] = CLIENTS if spoken == "chat" else HABITS
    tallies = {kind: Tally() for kind in (*kinds, MEDDLER)}
    for number in range(sessions):
        kind, seed = list(tallies)[number % len(tallies)], f"{name} {thinking} {number}"
        meddles, tally = kind == MEDDLER, tallies[kind]
        if spoken == "chat":
            how = "chat"
            apis, client = (CHAT,), CLIENTS.get(kind, echo)
        else:
            how, seed = "all" if meddles else kind, f"{seed} of the APIs"
            apis, client = HABITS[how], echo
        names = how in ("named", "all")
        session = Session(fam, apis, client, seed, tally, names=names, meddles=meddles)
        await session.run(CALLS)
    assert min(tally.expected for tally in tallies.values()) > sessions / len(tallies)
    honest = [tallies["echo"]] if spoken == "chat" else [tallies[kind] for kind in HABITS]
    share = sum(t.exact for t in honest) / sum(t.expected for t in honest)
    assert share >= CLAIMED.get(name, 0.0), tallies
    shares = ", ".join(f"{kind} {tally.share:.1%}" for kind, tally in tallies.items())
    calls = sum(tally.calls for tally in tallies.values())
    reasons = sum((tally.reasons for tally in tallies.values()), Counter[str]())
    told = f"{label(case)}, {spoken}: {sessions} sessions, {calls} calls, 0 drift; {shares}"
    record_property(FIGURE, told)
    record_property(FIGURE, f"{label(case)}, {spoken}: not continued: {dict(reasons)}")
