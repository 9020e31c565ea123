"""What is said of a wait for trajectories."""

from __future__ import annotations

from typing import Any

from any_agent.protocol.training import Capacity, Unfilled
from any_agent.rollout.admission import RankView, total
from any_agent.rollout.lease_executor import describe_waiting


def now(**told: Any) -> Capacity:
    counts = dict.fromkeys(("admitted", "reserved", "waiting", "running", "buffered", "limit"), 0)
    return Capacity(**(counts | told))


def group(name: str, closes_in: float, members: int = 1) -> Unfilled:
    return Unfilled(group_id=name, size=4, members=members, closes_in=closes_in)


def test_groups_that_are_not_full_are_named_whatever_their_rank() -> None:
    views = [
        RankView(now(running=2, unfilled=[group("late", 500.4), group("later", 600)]), limit=9),
        RankView(now(unfilled=[group("g~1", 20, members=3), group("last", 700)]), limit=9),
    ]
    assert describe_waiting(total(views)) == (
        "2 open, 0 waiting for a slot"
        "; group g~1 has 3 of 4 sessions, and up to 20 s for the others (sessions.group_timeout)"
        "; group late has 1 of 4 sessions, and up to 500 s for the others (sessions.group_timeout)"
        "; group later has 1 of 4 sessions, and up to 600 s for the others (sessions.group_timeout)"
    )
