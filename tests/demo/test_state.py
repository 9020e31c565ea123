"""What is known of a demo, from the trainer's lines and from counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from any_agent.demo.state import Rate, SessionTotals
from any_agent.runtime.log_tail import LogTail
from tests.support.demo import fresh, step


def test_lines_from_the_start_are_read_but_for_what_a_dead_trainer_left_of_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(step(1))[:20] + "\n" + json.dumps(step(2)) + "\n")
    assert [s["step"] for s in LogTail(path, from_start=True).new_records()] == [2]


def test_a_step_that_a_restarted_trainer_makes_again_counts_once() -> None:
    state = fresh()
    assert state.step == 0
    state = state.plus([step(1), step(2, reward=0.1)]).plus([step(3)])
    assert state.step == 3
    state = state.plus([step(2, reward=0.9)])
    assert [s["step"] for s in state.history] == [1, 2, 3]
    assert state.rewards == [0.5, 0.9, 0.5]


def test_sessions_are_summed_over_the_ranks_and_one_that_is_away_is_remembered() -> None:
    sessions = SessionTotals()
    both = """
# HELP any_agent_sessions Sessions of this trial by state, ended ones included.
# TYPE any_agent_sessions gauge
any_agent_sessions{rank="0",mode="train",state="open"} 3.0
any_agent_sessions{rank="0",mode="eval",state="evaluated"} 240.0
any_agent_sessions{rank="1",mode="train",state="open"} 4.0
any_agent_sessions{rank="1",mode="train",state="trained"} 64.0
any_agent_sessions_created_total{rank="0",mode="train"} 99.0
"""
    assert sessions.read(both) == {"open": 7, "trained": 64}
    one = """any_agent_sessions{rank="0",mode="train",state="finalized"} 5.0\n"""
    assert sessions.read(one) == {"open": 4, "finalized": 5, "trained": 64}
    assert SessionTotals().read("") == {}


def test_a_rate_is_of_the_last_seconds() -> None:
    rate = Rate(seconds=5.0)
    assert rate.add(0, now=100.0) == 0.0
    assert rate.add(20, now=101.0) == pytest.approx(20.0)
    assert rate.add(20, now=105.0) == pytest.approx(4.0)
    assert rate.add(20, now=110.0) == pytest.approx(0.0)
    assert rate.add(70, now=112.0) == pytest.approx(50 / 7)
    assert rate.add(70, now=112.0) == pytest.approx(50 / 7), "two looks at one moment"
