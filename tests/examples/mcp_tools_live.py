"""The example of tools over MCP, by the command of its README."""

from __future__ import annotations

from pathlib import Path

from tests.support.examples import run_example, small
from tests.support.tool_rows import check_tools


def test_the_example_trains(tmp_path: Path) -> None:
    given = small(tmp_path, "largest=4", "rollout.max_concurrent=4")
    # The Agents SDK, and what is installed here: mcp.
    run = run_example("mcp_tools", given, tmp_path, environment_of="example-openai_agents")
    assert [step["step"] for step in run.steps] == [1, 2]
    assert all(0 < reward < 1 for reward in run.rewards)
    check_tools(run)
