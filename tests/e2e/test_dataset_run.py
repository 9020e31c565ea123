"""A script that trains on a dataset, ended in every way, comes to what one comes to that is not.

The real service, engines and all, started by the script's own process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from any_agent.rundir.layout import RunDir
from tests.support.e2e.saved import assert_same, saved

STEPS = 8
FEW_STEPS = 3
LIMIT = 300.0
HOME = Path(__file__).parents[2]


class Script:
    """One run of it; ``said`` is what it printed so far."""

    def __init__(self, root: Path, model: Path, *more: str) -> None:
        self.run = RunDir.of(root, "u", "e", "t")
        settings = {
            "root": root,
            "user": "u",
            "experiment": "e",
            "trial": "t",
            "model.path": model,
            "server.port": 0,
            "server.ranks": 1,
            "engine.max_running_requests": 1,
            "rollout.deterministic": "true",
            "rollout.eta": 0,
            "rollout.batch_size": 4,
            "rollout.max_concurrent": 4,
            "sessions.group_size": 2,
            "train.steps": STEPS,
            "train.checkpoint_every": 2,
            "train.lr": 1e-3,
            "train.seed": 3,
        }
        arguments = [f"{key}={value}" for key, value in settings.items()]
        root.mkdir(exist_ok=True)
        self._children: list[psutil.Process] = []
        self._out = root / "said"
        self._offset = self._out.stat().st_size if self._out.exists() else 0
        with open(self._out, "ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.e2e.dataset_script", *arguments, *more],
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=HOME,
                env=os.environ | {"PYTHONPATH": str(HOME)},
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        return self._out.read_bytes()[self._offset :].decode()

    def until_step(self, step: int) -> None:
        self._until(lambda: self._reported() >= step)

    def send(self, number: int) -> None:
        # Before: once it is gone they are nobody's.
        self._children = psutil.Process(self._process.pid).children(recursive=True)
        assert len(self._children) >= 3, self.said
        self._process.send_signal(number)

    def ended(self) -> int:
        """Its exit code; none of its processes is left."""
        self._until(lambda: self._process.poll() is not None)
        self._until(lambda: not any(map(_lives, self._children)))
        code = self._process.returncode
        assert code is not None
        return code

    def _reported(self) -> int:
        metrics = self.run.metrics
        return metrics.read_text().count("\n") if metrics.exists() else 0

    def _until(self, there: Any) -> None:
        deadline = time.monotonic() + LIMIT
        while not there():
            assert time.monotonic() < deadline, self.said
            time.sleep(0.02)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


KILLED = (signal.SIGKILL, -9)
INTERRUPTED = (signal.SIGINT, 130)
TERMINATED = (signal.SIGTERM, 143)
SHORT = ((2, *KILLED), (4, *TERMINATED))
LONG = ((1, *KILLED), (3, *INTERRUPTED), (4, *KILLED), (5, *TERMINATED))
"""After which step, how, and the exit code."""


@pytest.mark.gate
def test_a_dataset_run_that_is_killed_goes_on_bit_for_bit(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    few = (f"train.steps={FEW_STEPS}", "train.checkpoint_every=1")
    # The two share nothing, and each waits for its processes to start.
    whole = Script(tmp_path / "whole", tiny_model_dir, *few)
    killed = Script(tmp_path / "killed", tiny_model_dir, *few)
    killed.until_step(1)
    killed.send(signal.SIGKILL)
    assert killed.ended() == -signal.SIGKILL, killed.said
    again = Script(tmp_path / "killed", tiny_model_dir, *few)
    assert whole.ended() == 0, whole.said
    assert again.ended() == 0, again.said
    expected = saved(whole.run, FEW_STEPS)
    assert [step for step, _, _ in expected.rewards] == list(range(1, FEW_STEPS + 1))
    assert_same(saved(again.run, FEW_STEPS), expected, sessions=False)


def test_a_dataset_run_ended_in_any_way_goes_on_as_if_unbroken(
    tmp_path: Path, tiny_model_dir: Path, long: bool
) -> None:
    whole = Script(tmp_path / "whole", tiny_model_dir)
    assert whole.ended() == 0, whole.said
    expected = saved(whole.run, STEPS)
    assert [step for step, _, _ in expected.rewards] == list(range(1, STEPS + 1))
    assert expected.dataset and expected.dataset["low"] == 2 * STEPS
    for step, number, code in LONG if long else SHORT:
        script = Script(tmp_path / "ended", tiny_model_dir)
        script.until_step(step)
        script.send(number)
        assert script.ended() == code, script.said
        if code > 0:
            assert "with a checkpoint" in script.said
            assert "Traceback" not in script.said
    last = Script(tmp_path / "ended", tiny_model_dir)
    assert last.ended() == 0, last.said
    assert_same(saved(last.run, STEPS), expected, sessions=False)
