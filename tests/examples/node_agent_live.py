"""The example of an agent for Node.js, by the commands of its README."""

from __future__ import annotations

import re
from pathlib import Path

from tests.clients.environment import node_with
from tests.support.examples import EXAMPLES, ROOT, number, run_example, small
from tests.support.trained_talks import check_talks, talks

_TOOL = 0.1


def test_the_example_trains(tmp_path: Path) -> None:
    readme = (EXAMPLES / "node_agent" / "README.md").read_text()
    (folder,) = re.findall(r"^npm ci --prefix (.*)$", readme, re.M)
    assert node_with("example-node_agent") == ROOT / folder
    run = run_example("node_agent", small(tmp_path), tmp_path, LARGEST="4", GROUP="4")
    assert [step["step"] for step in run.steps] == [1, 2]
    assert "of 4 finalized, mean reward" in run.said
    found = talks("node-agent", tmp_path)
    assert len(found) == sum(step["sessions"] for step in run.steps)
    check_talks(found, answer=number, reward=lambda right, used: right + _TOOL * used)
