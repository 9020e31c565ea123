"""Ranks are added and drained under load, by the command; real processes, 2 to 3 to 1 ranks."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.chaos import Plan, told
from tests.e2e.fleet import SHORT, run_fleet


def test_every_promise_is_kept_while_ranks_come_and_go(tmp_path: Path) -> None:
    plan = Plan(kills=0, agents=12, seed=0, steps=0, limit=800)
    outcome = run_fleet(tmp_path, plan, SHORT, say=print)
    print("\n" + "\n".join(told(outcome)))
    assert {name: problems[:5] for name, problems in outcome.problems.items() if problems} == {}
