"""The example of OpenAI's Agents SDK, by the command of its README."""

from __future__ import annotations

import re
from pathlib import Path

from tests.examples.lab import run_example, small

_CALL = re.compile(r'<tool_call>\s*\{"name": "add", "arguments": \{"a": (\d), "b": (\d)\}\}')
_RESULT = re.compile(r"<tool_response>\s*(\d+)\s*</tool_response>")
_ASKED = re.compile(r"What do (\d) and (\d) add up to\?")


def test_the_example_trains(tmp_path: Path) -> None:
    given = small(tmp_path, "largest=4")
    run = run_example("openai_agents", given, tmp_path, environment_of="openai_agents")
    assert [step["step"] for step in run.steps] == [1, 2]
    assert all(0 < reward < 1 for reward in run.rewards)
    after = [row for row in run.rows if "<tool_response>" in row["prompt"]]
    assert after, "nobody has used a tool"
    for row in after:
        a, b = map(int, _CALL.findall(row["prompt"])[-1])
        assert int(_RESULT.findall(row["prompt"])[-1]) == a + b, "the tool's own answer"
    finals = [row for row in run.rows if "<tool_call>" not in row["completion"]]
    for row in finals:
        a, b = map(int, _ASKED.findall(row["prompt"])[-1])
        right = re.findall(r"\d+", row["completion"]) == [str(a + b)]
        assert right == (row["reward"] == 1.0), row
