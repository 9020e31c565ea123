"""Commands that serve a model, where only the light install is: what is missing, in one line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import pytest

from any_agent.cli.main import main
from any_agent.demo import model
from any_agent.runtime.command_line import guarded
from trainer import any_agent_grpo

SERVED = ("numpy", "orjson", "psutil", "torch")


@pytest.fixture(autouse=True)
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SERVED:
        monkeypatch.setitem(sys.modules, name, None)


def test_a_command_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    commands = {
        "serve --no-train --model m": "serve",
        "serve --model m": "train",
        "train --model m": "train",
        "demo": "train",
        "doctor m": "serve",
        "export": "serve",
        "replay session": "serve",
        "sft --data d.jsonl --out out": "train",
    }
    runs: list[tuple[Callable[[], int], str]] = [
        *((partial(main, words.split()), extra) for words, extra in commands.items()),
        (partial(model.main, ["out"]), "train"),
        (partial(any_agent_grpo.main, ["--model", "m"]), "train"),
    ]
    for run, extra in runs:
        assert run() == 2
        out, said = capsys.readouterr()
        assert (out, said.count("\n")) == ("", 1)
        assert f"'any-agent-rl[{extra}]'" in said and f"'.[{extra}]'" in said
        assert all(name in said for name in SERVED)


def test_whatever_else_imports_what_is_left_out_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> int:
        import psutil

        return len(psutil.pids())

    assert guarded(run) == 2
    assert "psutil" in capsys.readouterr().err


def test_another_missing_module_keeps_its_trace() -> None:
    def run() -> int:
        raise ModuleNotFoundError("No module named 'mine'", name="mine")

    with pytest.raises(ModuleNotFoundError):
        guarded(run)
