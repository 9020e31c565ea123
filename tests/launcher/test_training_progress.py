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


def test_neither_an_earlier_runs_steps_nor_half_a_line_are_shown(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(f"{line(1)}\n")
    progress = TrainingProgress(metrics, 9)
    assert progress.new_lines() == []
    metrics.write_text(f"{line(1)}\n{line(2)[:20]}{line(2)}\n{line(3)}\n")
    assert [text.split()[1] for text in progress.new_lines()] == ["3/9"]


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
    waiting.unlink()
    assert progress.new_lines() == [], "a trainer forgets the waits of earlier ones"


def test_sessions_that_were_left_out_are_shown(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    first = {"rejected": {"zero_variance": 16}, "all": {"reward": 0.9, "sessions": 24, "dull": 16}}
    metrics.write_text(json.dumps(json.loads(line(1)) | first) + "\n")
    progress = TrainingProgress(metrics, 9)
    assert progress.new_lines() == []
    counts = [
        first | {"rejected": {"zero_variance": 32}},
        {"rejected": {"zero_variance": 32, "failed": 1}, "left_out": {"stale": 2}},
        # The trainer has started again, and counts from 0.
        {"rejected": {"zero_variance": 8}, "left_out": None},
    ]
    lines = [json.dumps(json.loads(line(k)) | each) for k, each in enumerate(counts, 2)]
    with metrics.open("a") as file:
        file.write("\n".join(lines) + "\n")
    shown = progress.new_lines()
    assert "0.900 over 24 sessions, 16 taught nothing" in shown[0]
    assert [text.partition("train 2.00 s")[2] for text in shown] == [
        "  left out 16 (zero_variance)",
        "  left out 1 (failed)  left out 2 (stale)",
        "  left out 8 (zero_variance)",
    ]
