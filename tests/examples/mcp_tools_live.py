"""The example of tools over MCP, by the command of its README."""

from __future__ import annotations

import re
from pathlib import Path

from tests.examples.lab import run_example, small

_USED = re.compile(
    r'"a": (\d), "b": (\d)\}\}\s*</tool_call>.{0,60}<tool_response>\s*(\d+)\s*</tool_response>',
    re.S,
)
"""A call and its result, as the model is shown them."""


def test_the_example_trains(tmp_path: Path) -> None:
    given = small(tmp_path, "largest=4", "rollout.max_concurrent=4")
    # The Agents SDK, and what is installed here: mcp.
    run = run_example("mcp_tools", given, tmp_path, environment_of="openai_agents")
    assert [step["step"] for step in run.steps] == [1, 2]
    assert all(0 < reward < 1 for reward in run.rewards)
    used = [found for row in run.rows for found in _USED.findall(row["prompt"])]
    assert used, "nobody has used a tool"
    assert all(int(a) + int(b) == int(sum) for a, b, sum in used), "the server's own answers"
