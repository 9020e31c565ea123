"""The demo's children: heard, timed, ended."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from any_agent.demo.child_process import ChildProcess
from any_agent.errors import StartupError
from tests.support.demo import line, write_lines

MARKS = ["--before", "0.25", "--after", "0.9", "--title", "a run"]


def test_what_went_wrong_is_told(tmp_path: Path) -> None:
    with (
        ChildProcess(
            "curve", tmp_path / "none.jsonl", tmp_path / "no" / "such.png", *MARKS
        ) as drawing,
        pytest.raises(StartupError, match=r"any_agent\.demo\.curve failed:\n(?s:.*)no step"),
    ):
        drawing.output(60)


def test_a_child_ends_with_its_context(tmp_path: Path) -> None:
    """The model takes seconds to make."""
    with ChildProcess("model", tmp_path / "m") as child:
        process = psutil.Process(child.pid)
        assert process.is_running()
    assert not process.is_running()


def test_a_child_that_takes_too_long(tmp_path: Path) -> None:
    with (
        ChildProcess("model", tmp_path / "m") as child,
        pytest.raises(StartupError, match="took over"),
    ):
        child.output(0.01)


def test_the_curve_is_drawn_from_the_runs_file(tmp_path: Path) -> None:
    metrics, png = tmp_path / "metrics.jsonl", tmp_path / "reward.png"
    write_lines(metrics, *(line(k, reward=k / 10) for k in range(1, 9)))
    with ChildProcess("curve", metrics, png, *MARKS) as drawing:
        drawing.output(120)
    assert png.read_bytes().startswith(b"\x89PNG\r\n")
