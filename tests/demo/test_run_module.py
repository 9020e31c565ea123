"""Modules of the demo in processes of their own: heard, timed, ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from any_agent.demo import demo
from any_agent.demo.demo import run_module
from any_agent.errors import StartupError
from any_agent.runtime.signals import handle_signals, interrupt
from tests.support.errors import fails_with
from tests.support.launcher.children import is_alive, until

RUN = {"experiment": "demo", "trial": "seed-0", "user": "u", "root": "r", "seed": 0}
RUN |= {"model": "tiny", "tokens": 4}
MARKS = {"before": 0.25, "after": 0.9, "title": "a run"}


@pytest.mark.service
def test_a_module_that_fails_is_named_with_its_error(tmp_path: Path) -> None:
    files = {"metrics": f"{tmp_path}/none.jsonl", "curve": f"{tmp_path}/no/such.png"}
    with fails_with(StartupError, "any_agent.demo.look_back", "no step"):
        run_module("look_back", json.dumps(RUN | MARKS | files))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("later", [True, False])
def test_an_interrupt_ends_the_child(
    later: bool, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that comes while it is being started. The model takes seconds to make."""
    started: list[psutil.Process] = []

    class Child(subprocess.Popen[str]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(psutil.Process(self.pid))
            if later:
                threading.Timer(0.2, os.kill, (os.getpid(), number)).start()
            else:
                os.kill(os.getpid(), number)

    monkeypatch.setattr(demo.subprocess, "Popen", Child)
    with handle_signals(interrupt, signal.SIGTERM), pytest.raises(KeyboardInterrupt):
        run_module("model", tmp_path / "m")
    (child,) = started
    until(lambda: not is_alive(child))


def test_a_module_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with fails_with(StartupError, "0.01"):
        run_module("model", tmp_path / "m", timeout=0.01)
