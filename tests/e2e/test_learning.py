"""A tiny model learns a task on a dataset, by a script as a researcher writes it: one seed each.

`make learn` looks at five.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.learning.runs import TASKS, prepare, train
from tests.e2e.learning.seeds import GAIN, learned

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
    assert learned(figures), figures
