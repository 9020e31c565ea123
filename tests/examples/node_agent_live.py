"""The example of an agent for Node.js, by the commands of its README."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.clients.environment import component
from tests.examples.lab import EXAMPLES, ROOT, run_example, small

_TOOL = 0.1


def test_the_example_trains(tmp_path: Path) -> None:
    npm = component("npm")
    readme = (EXAMPLES / "node_agent" / "README.md").read_text()
    (install,) = re.findall(r"^npm (ci .*)$", readme, re.M)
    subprocess.run([npm, *install.split()], cwd=ROOT, check=True, timeout=300)
    # A run without its reward from a tool may be right all the same.
    run = run_example("node_agent", small(tmp_path), tmp_path, LARGEST="4", GROUP="4")
    assert [step["step"] for step in run.steps] == [1, 2]
    assert {round(row["reward"], 3) for row in run.rows} <= {0.0, _TOOL, 1.0, 1.0 + _TOOL}
    used = [row for row in run.rows if "<tool_response>" in row["prompt"]]
    assert used, "nobody has used a tool"
    for row in run.rows:
        a, b = map(int, re.findall(r"What is (\d) \+ (\d)\?", row["prompt"])[-1])
        if re.fullmatch(r"\d+<\|im_end\|>", row["completion"]):
            right = row["completion"] == f"{a + b}<|im_end|>"
            assert row["reward"] == right + _TOOL * (row in used), row
