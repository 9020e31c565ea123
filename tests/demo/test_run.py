"""What the demo refuses before it does anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from any_agent.cli import main
from any_agent.demo import run
from any_agent.demo.run import demo_config, run_demo
from any_agent.errors import AnyAgentError, ConfigError


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(*_: object) -> None:
        raise AssertionError("it went on")

    monkeypatch.setattr(run, "_make_model", made)


def test_a_folder_that_holds_a_demo_is_not_used_again(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigError, match="is not empty; choose another folder"):
        run_demo(seed=0, keep=str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_new_folder_is_made(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="it went on"):
        run_demo(seed=0, steps=1, keep=str(tmp_path / "a" / "b"))
    assert (tmp_path / "a" / "b").is_dir()


@pytest.mark.parametrize("steps", ["0", "-1", "1.5"])
def test_steps_that_are_none(steps: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--steps", steps])
    assert ended.value.code == 2
    assert "--steps" in capsys.readouterr().err


def test_the_steps_that_were_asked_for(tmp_path: Path) -> None:
    assert demo_config(tmp_path, seed=3, steps=7).train.steps == 7


def test_what_went_wrong_first_is_told() -> None:
    first = AnyAgentError("first")
    group = ExceptionGroup("", [ExceptionGroup("", [first, AnyAgentError("second")])])
    assert run._first(group) is first
