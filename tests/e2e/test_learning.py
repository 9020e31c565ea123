"""A tiny model learns a task on a dataset, by a script as a researcher writes it: one seed.

`make learn` looks at five seeds, at the other tasks, and at how long they take; that a second try
is learned, `test_demo.py` shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.learning.curves import picture, summary
from benchmarks.learning.runs import prepare, train
from benchmarks.learning.seeds import GAIN

TASK, SEED = "tool_use", 0


def test_the_reward_rises_in_training(tmp_path: Path, record_property: Any) -> None:
    prepare(tmp_path, TASK, SEED)
    figures = train(tmp_path, TASK, SEED)
    record_property(
        "figure",
        f"{TASK}: reward {figures.before:.2f} -> {figures.after:.2f} in {figures.steps} steps, "
        f"{figures.seconds:.0f} s, {figures.cpu_seconds:.0f} s of CPU",
    )
    assert figures.before <= 1 - GAIN - 0.1, figures
    assert figures.gain >= GAIN, figures


def test_the_learning_curves_of_both_ways_are_drawn(tmp_path: Path) -> None:
    runs = {"dataset-fed": [[0.1, 0.5], [0.3, 0.7]], "proxy-fed": [[0.2, 0.6]]}
    png = tmp_path / "curves.png"
    picture(runs).savefig(png)
    assert png.read_bytes().startswith(b"\x89PNG\r\n")
    assert summary("dataset-fed", runs["dataset-fed"]).endswith("0.400 +- 0.100")
