"""The lines to type next."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from any_agent.demo import report
from any_agent.demo.report import command, next_lines
from any_agent.demo.run import demo_config
from tests.support.demo import report as found


def test_the_command_names_the_run_whatever_its_folder_is_called(tmp_path: Path) -> None:
    config = demo_config(tmp_path / "a b's", seed=4, steps=1, ranks=2)
    (_, serve), *_ = next_lines(config, "any-agent")
    typed = shlex.split("\n".join(serve).replace("\\\n", ""))
    assert typed[:2] == ["any-agent", "serve"]
    assert typed[-1] == f"root={tmp_path}/a b's/runs"
    assert typed[typed.index("--trial") + 1] == "seed-4"


def test_the_command_is_one_that_can_be_typed_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report.shutil, "which", lambda _: "/usr/bin/any-agent")
    assert command() == "any-agent"
    monkeypatch.setattr(report.shutil, "which", lambda _: None)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "my env" / "bin" / "python"))
    monkeypatch.chdir(tmp_path)
    assert command() == "'my env/bin/any-agent'"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert shlex.split(command()) == [str(tmp_path / "my env" / "bin" / "any-agent")]


def test_an_answer_is_told_on_one_line() -> None:
    facts = found(answers=[("What is 2 + 3?", "Two\nplus\x1b[2J three is 5.")]).facts()
    assert (
        "asked",
        "What is 2 + 3?  ->  Two plus\N{REPLACEMENT CHARACTER}[2J three is 5.",
    ) in facts
