"""The example of an agent in bash, by the command of its README."""

from __future__ import annotations

from pathlib import Path

from tests.clients.environment import component
from tests.support.examples import run_example, small
from tests.support.trained_talks import check_talks, talks


def test_the_example_trains(tmp_path: Path) -> None:
    for program in ("curl", "jq"):
        component(program)
    run = run_example("shell_agent", small(tmp_path), tmp_path, LARGEST="4", GROUP="4")
    assert [step["step"] for step in run.steps] == [1, 2]
    # Groups whose runs all score the same teach nothing, and are in no step.
    assert all(0 < reward < 1 for reward in run.rewards)
    assert "of 4 finalized, mean reward" in run.said
    found = talks("shell-agent", tmp_path)
    assert len(found) == sum(step["sessions"] for step in run.steps)
    # Its reward is that of the last line that it prints, and of nothing else in that line.
    check_talks(
        found,
        answer=lambda said: said.split("\n")[-1],
        reward=lambda right, used: float(right),
    )
