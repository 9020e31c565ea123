"""What the demo refuses before it does anything, what it is seen as, and how it ends."""

from __future__ import annotations

import io
import os
import signal
from pathlib import Path

import pytest

from any_agent.cli.main import main
from any_agent.demo import demo
from any_agent.demo.run import can_draw, run_demo
from any_agent.errors import ConfigError
from tests.support.errors import fails_with


class WentOn(Exception):
    """It began to work."""


@pytest.fixture(autouse=True)
def no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(*_: object) -> None:
        raise WentOn

    monkeypatch.setattr(demo, "run_module", made)


def test_a_folder_that_holds_a_demo_is_not_used_again(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with fails_with(ConfigError, tmp_path):
        run_demo(seed=0, keep=str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_figures_that_cannot_be_written_are_refused_at_the_start(tmp_path: Path) -> None:
    with fails_with(ConfigError, "--json", "none/figures.json"):
        run_demo(seed=0, keep=str(tmp_path), json_path=str(tmp_path / "none" / "figures.json"))


def test_steps_and_ranks_must_be_whole_numbers_above_zero(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for option in ("--steps", "--ranks"):
        for number in ("0", "-1", "1.5"):
            with fails_with(SystemExit, code=2):
                main(["demo", option, number])
            assert option in capsys.readouterr().err


@pytest.mark.parametrize("error", [KeyboardInterrupt, WentOn])
def test_whoever_stops_it_is_told_where_the_files_are(
    error: type[BaseException],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def stopped(*_: object) -> None:
        raise error

    monkeypatch.setattr(demo, "run_module", stopped)
    with pytest.raises(error):
        run_demo(seed=0, keep=str(tmp_path))
    assert capsys.readouterr().out.splitlines()[-1] == f"stopped   files are in {tmp_path}"


def test_sigterm_is_as_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(demo, "run_module", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(KeyboardInterrupt):
        run_demo(seed=0, keep=str(tmp_path))
    assert signal.getsignal(signal.SIGTERM) is before


class Terminal(io.StringIO):
    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


def test_a_frame_needs_a_terminal_that_can_draw() -> None:
    assert can_draw(Terminal(), {"TERM": "xterm-256color"})
    assert can_draw(Terminal(), {"TERM": "xterm", "NO_COLOR": "1"}), "in one colour"
    assert not can_draw(Terminal(), {"TERM": "dumb"})
    assert not can_draw(Terminal(), {})
    assert not can_draw(io.StringIO(), {"TERM": "xterm", "FORCE_COLOR": "1"})
    ascii_only = Terminal()
    ascii_only.encoding = "ansi_x3.4-1968"  # type: ignore[misc]
    assert not can_draw(ascii_only, {"TERM": "xterm"})
