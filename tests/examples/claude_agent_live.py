"""The example of the Claude Agent SDK, by the command of its README."""

from __future__ import annotations

from pathlib import Path

from tests.support.examples import run_example, small
from tests.support.tool_rows import check_rows


def test_the_example_trains(tmp_path: Path) -> None:
    settings = small(tmp_path, "largest=4", "rollout.max_concurrent=4")
    run = run_example("claude_agent", settings, tmp_path, environment_of="example-claude_agent")
    check_rows(run, tool="mcp__calculator__add")
