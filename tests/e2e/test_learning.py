"""A tiny model learns a task on a dataset, by a script as a researcher writes it: one seed each.

`make learn` looks at five, and at how long they take.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.learning.curves import picture, summary
from tests.e2e.learning.runs import TASKS, prepare, train
from tests.e2e.learning.seeds import GAIN

SEED = 0


@pytest.mark.timeout(900)
@pytest.mark.parametrize("task", sorted(TASKS))
def test_the_reward_rises(task: str, tmp_path: Path, record_property: Any) -> None:
    prepare(tmp_path, task, SEED)
    figures = train(tmp_path, task, SEED)
    record_property(
        "figure",
        f"{task}: reward {figures.before:.2f} -> {figures.after:.2f} in {figures.steps} steps, "
        f"{figures.seconds:.0f} s, {figures.cpu_seconds:.0f} s of CPU",
    )
    assert figures.before <= 1 - GAIN - 0.1, figures
    assert figures.gain >= GAIN, figures


def test_the_curves_of_both_ways_are_drawn(tmp_path: Path) -> None:
    runs = {"dataset-fed": [[0.1, 0.5], [0.3, 0.7]], "proxy-fed": [[0.2, 0.6]]}
    png = tmp_path / "curves.png"
    picture(runs).savefig(png)
    assert png.read_bytes().startswith(b"\x89PNG\r\n")
    assert summary("dataset-fed", runs["dataset-fed"]).endswith("0.400 +- 0.100")
