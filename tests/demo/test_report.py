"""The lines to type next."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from any_agent.demo import report
from any_agent.demo.report import command, next_lines
from any_agent.demo.run import demo_config
from tests.support.demo import report as found


def lines(root: Path) -> list[tuple[str, list[str]]]:
    return next_lines(demo_config(root, seed=4, steps=1, ranks=2), "any-agent")


def test_the_command_names_the_run_whatever_its_folder_is_called(tmp_path: Path) -> None:
    (_, serve), *_ = lines(tmp_path / "a b's")
    typed = shlex.split("\n".join(serve).replace("\\\n", ""))
    assert typed[:2] == ["any-agent", "serve"]
    assert typed[-1] == f"root={tmp_path}/a b's/runs"
    assert typed[typed.index("--trial") + 1] == "seed-4"


def test_the_key_is_taken_out_of_the_answer(tmp_path: Path) -> None:
    """By the line as it is, with an answer in place of the service."""
    _, (_, connect), _ = lines(tmp_path)
    answer = '{"session_id":"ses-0-1","api_key":"sk-v1.0.lane.mac","base_url":"http://x/v1"}'
    script = "\n".join([f"curl() {{ echo '{answer}'; }}", *connect, 'echo "$OPENAI_API_KEY"'])
    told = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True)
    assert told.stdout == "sk-v1.0.lane.mac\n"


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
