"""The examples of agents' frameworks, by the commands of their READMEs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.examples import read, run_example, small
from tests.support.tool_rows import check_rows, check_tools

_ASKED = re.compile(r"What do (\d) and (\d) add up to\?")


@pytest.mark.parametrize(
    ("example", "tool", "more"),
    [
        ("camel", "add", []),
        ("claude_agent", "mcp__calculator__add", ["rollout.max_concurrent=4"]),
        ("langchain", "add", []),
    ],
)
def test_the_example_trains(example: str, tool: str, more: list[str], tmp_path: Path) -> None:
    settings = small(tmp_path, "largest=4", *more)
    run = run_example(example, settings, tmp_path, environment_of=f"example-{example}")
    check_rows(run, tool=tool)


@pytest.mark.parametrize("example", ["mcp_tools", "openai_agents"])
def test_an_example_on_the_agents_sdk_trains(example: str, tmp_path: Path) -> None:
    """The example of tools over MCP needs the package mcp, too, which is installed here."""
    more = ["rollout.max_concurrent=4"] if example == "mcp_tools" else []
    settings = small(tmp_path, "largest=4", *more)
    run = run_example(example, settings, tmp_path, environment_of="example-openai_agents")
    assert [step["step"] for step in run.steps] == [1, 2]
    assert all(0 < reward < 1 for reward in run.rewards)
    check_tools(run)
    if example == "openai_agents":
        # Whether 05 is 5 is math-verify's matter.
        finals = [row for row in run.rows if re.fullmatch(r"0|[1-9]\d*", read(row))]
        assert finals
        for row in finals:
            a, b = map(int, _ASKED.findall(row["prompt"])[0])
            assert (read(row) == str(a + b)) == (row["reward"] == 1.0), row
