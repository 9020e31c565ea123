"""Lines for the steps that the trainer reports."""

from __future__ import annotations

import json
import os
from pathlib import Path

from any_agent.launcher.training_progress import TrainingProgress
from any_agent.runtime.atomic_files import write_atomic


def line(step: int) -> str:
    figures = {"reward": 0.5, "version": step, "staleness_mean": 0.25}
    seconds = {"wait": 1.0, "pack": 0.5, "forward": 0.25, "backward": 0.75, "optimizer": 0.5}
    return json.dumps({"step": step, "seconds": seconds | {"sync": 9}, **figures})


def test_steps_are_shown_once_and_whole(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    progress = TrainingProgress(metrics, 9)
    assert progress.new_lines() == []
    metrics.write_text(line(1) + "\n" + line(2) + "\n" + line(3)[:20])
    assert [text.split()[1] for text in progress.new_lines()] == ["1/9", "2/9"]
    assert progress.new_lines() == []
    metrics.write_text(f"{line(1)}\n{line(2)}\n{line(3)}\n")
    (shown,) = progress.new_lines()
    assert shown == (
        "step        3/9  reward 0.500  version 3  staleness 0.25  wait 1.00 s  train 2.00 s"
    )
    assert progress.step == 3


def test_what_a_trainer_that_died_left_of_a_line_harms_nothing(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    progress = TrainingProgress(metrics, 9)
    metrics.write_text(line(1)[:20] + line(1) + "\n" + line(2) + "\n")
    assert [text.split()[1] for text in progress.new_lines()] == ["2/9"]


def test_an_earlier_runs_steps_are_not_shown(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(line(1) + "\n")
    assert TrainingProgress(metrics, 9).new_lines() == []


def test_what_the_trainer_waits_for_is_shown_whenever_it_says_so(tmp_path: Path) -> None:
    waiting = tmp_path / "waiting.txt"
    waiting.write_text("waiting   of an earlier run\n")
    progress = TrainingProgress(tmp_path / "metrics.jsonl", 9, waiting)
    assert progress.new_lines() == []
    for seconds in (60, 120):
        write_atomic(waiting, f"waiting   {seconds} s\nwaiting   dull\n")
        os.utime(waiting, (seconds, seconds))
        assert progress.new_lines() == [f"waiting   {seconds} s", "waiting   dull"]
        assert progress.new_lines() == []
