"""The example of a workflow of one's own, by the command of its README."""

from __future__ import annotations

from pathlib import Path

from tests.support.examples import asked, number, run_example, small


def test_the_example_trains(tmp_path: Path) -> None:
    run = run_example("custom_workflow", small(tmp_path, "largest=4", "budget=3"), tmp_path)
    assert [step["step"] for step in run.steps] == [1, 2]
    assert all(0 < reward < 1 for reward in run.rewards)
    assert all(0 < step["stats"]["rollout/cut"] <= 1 for step in run.steps)
    for row in run.rows:
        # Thoughts and all: it reads them, too.
        right = number(row["completion"]) == str(sum(asked(row)))
        assert right == (row["reward"] == 1.0), row
