"""The example of OpenAI's Agents SDK, by the command of its README."""

from __future__ import annotations

import re
from pathlib import Path

from tests.examples.lab import run_example, small

_USED = re.compile(
    r'"a": (\d), "b": (\d)\}\}\s*</tool_call>.{0,60}<tool_response>\s*(\d+)\s*</tool_response>',
    re.S,
)
"""A call and its result, as the model is shown them."""
_ASKED = re.compile(r"What do (\d) and (\d) add up to\?")


def test_the_example_trains(tmp_path: Path) -> None:
    given = small(tmp_path, "largest=4")
    run = run_example("openai_agents", given, tmp_path, environment_of="openai_agents")
    assert [step["step"] for step in run.steps] == [1, 2]
    assert all(0 < reward < 1 for reward in run.rewards)
    used = [found for row in run.rows for found in _USED.findall(row["prompt"])]
    assert used, "nobody has used a tool"
    assert all(int(a) + int(b) == int(sum) for a, b, sum in used), "the tool's own answers"
    finals = [row for row in run.rows if re.fullmatch(r"\d+<\|im_end\|>", row["completion"])]
    assert finals
    for row in finals:
        a, b = map(int, _ASKED.findall(row["prompt"])[-1])
        assert (row["completion"] == f"{a + b}<|im_end|>") == (row["reward"] == 1.0), row
