"""One contract for trackio, Weights & Biases and TensorBoard, by the real packages, offline."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from any_agent.config import load_config
from any_agent.rundir.layout import RunDir
from any_agent.runtime.atomic_files import append_line
from tests.clients.environment import python_with

ROOT = Path(__file__).resolve().parents[3]
NAMES = ("tensorboard", "trackio", "wandb")
SECRET = "sk-a-key-that-nobody-may-see"
LIMIT = 120.0


class Run:
    """A run without a trainer, whose lines the test writes."""

    def __init__(self, tracker: str, folder: Path) -> None:
        self.tracker = tracker
        self.python = python_with("trackers")
        self.settings = [
            f"root={folder / 'runs'}",
            "experiment=sums",
            "trial=first",
            f"tracking.to={tracker}",
            "train.lr=0.25",
        ]
        config = load_config(None, self.settings, environ={})
        self.dir = RunDir.of(config.root, config.user, config.experiment, config.trial)
        self.dir.create()
        self.folder = self.dir.path / "tracking"
        self.store = folder / "trackio"
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "TRACKIO"))},
            "PYTHONPATH": str(ROOT),
            "WANDB_MODE": "offline",
            "WANDB_API_KEY": "b" * 40,
            "TRACKIO_DIR": str(self.store),
            "ANY_AGENT_SERVER__ADMIN_KEY": SECRET,
            "HOME": str(folder),
        }

    def write(self, *steps: int, **fields: Any) -> None:
        for step in steps:
            line = {"time": 1e9 + step, "step": step, "version": step, "reward": step / 10}
            line |= {"seconds": {"wait": 0.5}, "entropy": math.nan, "stats": {"rollout/turns": 2.0}}
            append_line(self.dir.metrics, json.dumps(line | fields))

    def evaluate(self, step: int, reward: float) -> None:
        line = {"time": 1e9 + step, "step": step, "version": step, "eval": {"reward": reward}}
        append_line(self.dir.metrics, json.dumps(line))

    def follow(self) -> None:
        """One start, which ends as a trainer does whose steps are done."""
        done = subprocess.run(
            self._command("follow", *self.settings),
            input="",
            env=self.environment,
            cwd=self.dir.path,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self._command("follow", *self.settings),
            stdin=subprocess.PIPE,
            env=self.environment,
            cwd=self.dir.path,
            text=True,
        )

    @property
    def sent(self) -> int:
        """The number of lines that the tracker has got, as its thread notes."""
        path = self.folder / f"{self.tracker}.json"
        return int(path.read_text()) if path.exists() else 0

    def read(self) -> dict[str, Any]:
        """The one run that the tracker has."""
        (run,) = self.runs()
        return run

    def runs(self) -> list[dict[str, Any]]:
        """The runs that the tracker has; it may store the first one a moment later."""
        done = subprocess.run(
            self._command("read_back", self.tracker, str(self.folder)),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return list(json.loads(done.stdout.splitlines()[-1])["runs"])

    def _command(self, program: str, *arguments: str) -> list[str]:
        return [str(self.python), "-m", f"tests.clients.trackers.{program}", *arguments]


@pytest.fixture(params=NAMES)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    return Run(request.param, tmp_path)


def rewards(points: Mapping[str, Any]) -> list[tuple[int, float]]:
    return [(step, round(value, 6)) for step, value in points["train/reward"]]


def test_a_resumed_run_is_one_run_with_each_step_once(run: Run) -> None:
    run.write(1, 2, 3)
    run.evaluate(3, 0.75)
    run.follow()
    run.write(4)
    run.follow()
    run.evaluate(4, 0.875)
    run.write(5)
    run.follow()
    run.follow()
    found = run.read()
    points = found["points"]
    assert rewards(points) == [(k, k / 10) for k in (1, 2, 3, 4, 5)]
    assert points["eval/reward"] == [[3, 0.75], [4, 0.875]]
    assert points["train/seconds/wait"] == [[k, 0.5] for k in (1, 2, 3, 4, 5)]
    assert points["rollout/turns"] == [[k, 2.0] for k in (1, 2, 3, 4, 5)]
    assert "train/entropy" not in points
    if run.tracker != "tensorboard":
        assert found["project"] == "sums" and found["name"].startswith("first")


def test_a_killed_trainers_steps_are_neither_lost_nor_doubled(run: Run) -> None:
    run.write(1, 2)
    process = run.start()
    try:
        if run.tracker == "wandb":
            # It stores them when it ends; a killed one has some of them, or none.
            eventually(lambda: any(run.folder.glob("wandb/*/run-*.wandb")), LIMIT)
        else:
            eventually(lambda: run.sent == 2, LIMIT)
        run.write(3)
        print(file=process.stdin, flush=True)
        if run.tracker == "tensorboard":
            eventually(lambda: run.sent == 3, LIMIT)
        elif run.tracker == "trackio":
            # It writes twice a second.
            eventually(lambda: [len(rewards(one["points"])) for one in run.runs()] == [3], LIMIT)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(LIMIT)
    run.write(4)
    run.follow()
    assert rewards(run.read()["points"]) == [(k, k / 10) for k in (1, 2, 3, 4)]


def test_the_settings_are_shown_and_no_secret(run: Run, tmp_path: Path) -> None:
    run.write(1)
    run.follow()
    config = run.read()["config"]
    assert config["train"]["lr"] == 0.25 and config["experiment"] == "sums"
    assert not {"server", "engine", "frozen"} & set(config)
    kept = [path for root in (run.folder, run.store) for path in files(root)]
    assert kept
    for path in kept:
        content = path.read_bytes()
        for secret in (SECRET, "b" * 40, *run.settings):
            assert secret.encode() not in content, path


def files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def eventually(condition: Callable[[], bool], limit: float) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
