"""The example of OpenAI's Agents SDK, by the command of its README."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.examples import read, run_example, small
from tests.support.tool_rows import check_tools

_ASKED = re.compile(r"What do (\d) and (\d) add up to\?")


def test_the_example_trains(tmp_path: Path) -> None:
    given = small(tmp_path, "largest=4")
    run = run_example("openai_agents", given, tmp_path, environment_of="example-openai_agents")
    assert [step["step"] for step in run.steps] == [1, 2]
    assert all(0 < reward < 1 for reward in run.rewards)
    check_tools(run)
    # Whether 05 is 5 is math-verify's matter.
    finals = [row for row in run.rows if re.fullmatch(r"0|[1-9]\d*", read(row))]
    assert finals
    for row in finals:
        a, b = map(int, _ASKED.findall(row["prompt"])[0])
        assert (read(row) == str(a + b)) == (row["reward"] == 1.0), row
