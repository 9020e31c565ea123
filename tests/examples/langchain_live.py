"""The example of LangChain's agent, by the command of its README."""

from __future__ import annotations

from pathlib import Path

from tests.support.examples import run_example, small
from tests.support.tool_rows import check_rows


def test_the_example_trains(tmp_path: Path) -> None:
    settings = small(tmp_path, "largest=4")
    run = run_example("langchain", settings, tmp_path, environment_of="example-langchain")
    check_rows(run, tool="add")
