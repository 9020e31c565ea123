"""The example of an agent in bash, by the command of its README."""

from __future__ import annotations

import re
from pathlib import Path

from tests.clients.environment import component
from tests.examples.lab import run_example, small

_USED = re.compile(
    r'"a": (\d), "b": (\d)\}\}\s*</tool_call>.{0,60}<tool_response>\s*(\d+)\s*</tool_response>',
    re.S,
)
"""A call and its result, as the model is shown them."""


def test_the_example_trains(tmp_path: Path) -> None:
    for program in ("curl", "jq"):
        component(program)
    run = run_example("shell_agent", small(tmp_path), tmp_path, LARGEST="4", GROUP="4")
    assert [step["step"] for step in run.steps] == [1, 2]
    # Groups whose runs all score the same teach nothing, and are in no step.
    assert all(0 < reward < 1 for reward in run.rewards)
    used = [found for row in run.rows for found in _USED.findall(row["prompt"])]
    assert used, "nobody has used a tool"
    assert all(int(a) + int(b) == int(sum) for a, b, sum in used), "what bash has added"
    finals = [row for row in run.rows if re.fullmatch(r"\d+<\|im_end\|>", row["completion"])]
    assert finals
    for row in finals:
        a, b = map(int, re.findall(r"What is (\d) \+ (\d)\?", row["prompt"])[-1])
        assert (row["completion"] == f"{a + b}<|im_end|>") == (row["reward"] == 1.0), row
    assert "of 4 finalized, mean reward" in run.said
