"""What is known of a demo, from the trainer's lines and from counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from any_agent.demo.state import Metrics, Rate, Step
from tests.demo.demo_lab import fresh, line, step, write_lines


def test_a_step_is_what_the_trainer_wrote() -> None:
    assert step(3) == Step(
        number=3,
        reward=0.5,
        version=3,
        staleness=0.25,
        trained=64,
        left_out=1,
        rejected=24,
        wait=1.0,
        train=0.5,
    )


def test_lines_are_read_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path)
    assert metrics.new() == []
    write_lines(path, line(1), line(2))
    third = json.dumps(line(3)) + "\n"
    with open(path, "a") as file:
        file.write(third[:20])
    assert [s.number for s in metrics.new()] == [1, 2]
    assert metrics.new() == []
    with open(path, "a") as file:
        file.write(third[20:])
    assert [s.number for s in metrics.new()] == [3]


def test_sessions_are_counted_over_all_steps() -> None:
    state = fresh()
    assert (state.step, state.trained, state.rejected) == (0, 0, 0)
    state = state.plus([step(1), step(2)]).plus([step(3)])
    assert (state.step, state.trained) == (3, 3 * 64)
    assert state.rejected == 3 * 1 + 24
    assert state.rewards == [0.5] * 3


def test_a_step_that_a_restarted_trainer_makes_again_counts_once() -> None:
    """And what the life before rejected is not forgotten."""
    state = fresh().plus([step(1), step(2, reward=0.1), step(3)])
    state = state.plus([step(2, reward=0.9, rejected={"no_variance": 2})])
    state = state.plus([step(3, rejected={"no_variance": 5})])
    assert [s.number for s in state.history] == [1, 2, 3]
    assert state.rewards == [0.5, 0.9, 0.5]
    assert state.trained == 3 * 64
    assert state.rejected == 3 * 1 + 8 + 5


def test_a_rate_is_of_the_last_seconds() -> None:
    rate = Rate(seconds=5.0)
    assert rate.add(0, now=100.0) == 0.0
    assert rate.add(20, now=101.0) == pytest.approx(20.0)
    assert rate.add(20, now=105.0) == pytest.approx(4.0)
    assert rate.add(20, now=110.0) == pytest.approx(0.0)
    assert rate.add(70, now=112.0) == pytest.approx(50 / 7)
    assert rate.add(70, now=112.0) == pytest.approx(50 / 7), "two looks at one moment"
