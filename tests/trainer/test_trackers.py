"""Trackers get every line of metrics.jsonl once, whatever happens, and never stop the training."""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from any_agent.config import Config
from any_agent.errors import ConfigError
from any_agent.rundir.layout import RunDir
from any_agent.runtime.atomic_files import append_line
from tests.support.errors import fails_with
from tests.support.trainer.episodes import pair
from tests.support.trainer.loop import Lab, config_of
from trainer import trackers
from trainer.trackers import TrackedRun, Trackers, figures, require_trackers

LIMIT = 30.0


class Fake:
    """A tracker that keeps what it gets, as a service does that outlives its clients."""

    replaces: ClassVar[bool] = False
    got: ClassVar[list[tuple[int, int]]]
    """The number and the step of each line."""
    opened: ClassVar[list[tuple[str, int]]]
    runs: ClassVar[list[TrackedRun]]
    broken: ClassVar[Callable[[int], bool]]
    changed: ClassVar[threading.Condition]

    def __init__(self, run: TrackedRun, step: int) -> None:
        self.opened.append((run.id, step))
        self.runs.append(run)

    def send(self, number: int, line: Any) -> None:
        if type(self).broken(number):
            raise OSError("no network")
        with self.changed:
            self.got.append((number, line["step"]))
            self.changed.notify_all()

    def flush(self) -> bool:
        return True

    def close(self) -> None: ...


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Fake]]:
    Fake.got, Fake.opened, Fake.runs = [], [], []
    Fake.replaces = False
    Fake.broken = lambda number: False
    Fake.changed = threading.Condition()
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Fake)  # type: ignore[arg-type]
    monkeypatch.setattr(trackers, "require_trackers", lambda names: None)
    yield Fake


class Run:
    """A run's folder, whose lines of metrics one start of the trainer after another sends."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.dir = RunDir.of(config.root, config.user, config.experiment, config.trial)
        self.dir.create()

    def write(self, *steps: int, **fields: Any) -> None:
        for step in steps:
            append_line(self.dir.metrics, json.dumps({"time": 1.0, "step": step, **fields}))

    def sent(self, *steps: int, **fields: Any) -> Trackers:
        """A start that ends at once, after these lines."""
        self.write(*steps, **fields)
        trackers = Trackers(self.config, self.dir)
        with trackers.following():
            pass
        return trackers


@pytest.fixture
def run(tmp_path: Path) -> Run:
    settings = [f"root={tmp_path}", "tracking.to=wandb", "server.admin_key=sk-very-secret"]
    return Run(config_of(settings))


def test_each_line_is_sent_once_over_restarts(fake: type[Fake], run: Run) -> None:
    run.sent(1, 2)
    assert fake.got == [(1, 1), (2, 2)]
    run.sent()
    assert len(fake.opened) == 1, "there is nothing to send"
    with open(run.dir.metrics, "a") as file:
        file.write('{"step": 3, "rew')  # a killed trainer's
    run.sent(3)
    assert fake.got == [(1, 1), (2, 2), (4, 3)]
    assert [step for _, step in fake.opened] == [1, 3]
    assert len({id for id, _ in fake.opened}) == 1, "it is one run"


def test_lines_are_sent_while_training_goes_on(fake: type[Fake], run: Run) -> None:
    following = Trackers(run.config, run.dir)
    with following.following():
        for step in (1, 2, 3):
            run.write(step)
            following.wake()
            with fake.changed:
                assert fake.changed.wait_for(lambda: len(fake.got) == step, LIMIT)  # noqa: B023
    assert [step for _, step in fake.got] == [1, 2, 3]
    assert len(fake.opened) == 1


def test_a_tracker_that_fails_is_tried_again_and_gets_all(
    fake: type[Fake], run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trackers, "FIRST_DELAY", 0.001)
    monkeypatch.setattr(trackers, "MAX_DELAY", 0.001)
    fails = iter([True, True])
    fake.broken = lambda number: number == 2 and next(fails, False)
    run.write(1, 2, 3)
    following = Trackers(run.config, run.dir)
    with following.following(), fake.changed:
        assert fake.changed.wait_for(lambda: len(fake.got) == 3, LIMIT)
    assert fake.got == [(1, 1), (2, 2), (3, 3)]
    assert following.failures == {"wandb": 2}
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "OSError: no network" in warning and "training goes on" in warning
    assert following.take_notices() == ["wandb fails (OSError: no network)"]
    assert following.take_notices() == []


def test_a_tracker_gets_the_lines_that_it_missed_at_the_next_start(
    fake: type[Fake], run: Run
) -> None:
    fake.broken = lambda number: number >= 2
    run.sent(1, 2, 3)
    assert fake.got == [(1, 1)]
    fake.broken = lambda number: False
    run.sent()
    assert fake.got == [(1, 1), (2, 2), (3, 3)]
    # A file that was emptied ends nothing.
    run.dir.metrics.unlink()
    run.sent()
    following = run.sent(4)
    assert [step for _, step in fake.got] == [1, 2, 3, 4]
    assert following.failures == {"wandb": 0}


@pytest.mark.parametrize("replaces", [False, True])
def test_a_run_that_goes_back_sends_its_repeated_steps_as_the_tracker_can(
    fake: type[Fake], run: Run, replaces: bool
) -> None:
    """A tracker that can replace steps does so from there on."""
    fake.replaces = replaces
    run.sent(1, 2, 3)
    run.sent(2, 3, 4)
    # Twice as sent, and then all at once, for a tracker that is added later.
    for _ in range(2):
        assert [step for _, step in fake.got] == [1, 2, 3, 2, 3, 4]
        assert [step for _, step in fake.opened] == [1, 2]
        fake.got.clear()
        fake.opened.clear()
        (run.dir.path / "tracking" / "wandb.json").unlink()
        run.sent()
    # An evaluation after a restart does not remove its step.
    fake.got.clear()
    run.sent(4, eval={"reward": 0.5})
    assert fake.got == ([(6, 4), (7, 4)] if replaces else [(7, 4)])


def test_a_tracker_that_hangs_is_not_waited_for_long(
    fake: type[Fake], run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trackers, "HURRIED_TIMEOUT", 0.05)
    asked, go_on = threading.Event(), threading.Event()

    def hang(number: int) -> bool:
        asked.set()
        return not go_on.wait(LIMIT)

    fake.broken = hang
    run.write(1)
    with Trackers(run.config, run.dir).following(lambda: True):
        assert asked.wait(LIMIT)
    assert fake.got == []
    assert "wandb has not got all lines; the next start sends them" in caplog.text
    go_on.set()


def test_trackers_get_settings_without_secrets(fake: type[Fake], run: Run) -> None:
    run.sent(1)
    (tracked,) = fake.runs
    text = json.dumps(tracked.config)
    assert "very-secret" not in text and "admin_key" not in text
    assert not {"server", "engine", "frozen", "cluster"} & set(tracked.config)
    assert tracked.config["train"]["lr"] == run.config.train.lr
    assert (tracked.project, tracked.name) == (run.config.experiment, run.config.trial)
    assert tracked.folder.stat().st_mode & 0o077 == 0


def test_a_line_of_metrics_becomes_flat_figures_without_times_and_gaps() -> None:
    line = {
        "time": 1.0,
        "step": 3,
        "version": 4,
        "reward": 0.5,
        "entropy": math.nan,
        "epoch": None,
        "seconds": {"wait": 1.5},
        "capacity": {"running": 2, "full": True},
        "stats": {"rollout/reward": 0.25},
    }
    assert figures(line) == {
        "train/version": 4,
        "train/reward": 0.5,
        "train/seconds/wait": 1.5,
        "train/capacity/running": 2,
        "rollout/reward": 0.25,
    }
    found = {"reward": 0.5, "ci95": [0.25, 0.75], "failed": {}, "stats": {"eval-rollout/x": 1}}
    assert figures({"time": 1.0, "step": 3, "version": 4, "eval": found}) == {
        "eval/reward": 0.5,
        "eval/ci95/0": 0.25,
        "eval/ci95/1": 0.75,
        "eval-rollout/x": 1,
    }


def test_a_tracker_that_is_unknown_or_not_installed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fails_with(ConfigError, "tracking.to", *map(repr, trackers.TRACKERS)):
        config_of(["tracking.to=mlflow"])
    # A folder that wandb leaves in the working directory can be imported, and is no package.
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    for name in trackers.TRACKERS:
        if name != "wandb":
            monkeypatch.setattr(trackers, "find_spec", lambda _: None)
        with fails_with(ConfigError, f'pip install "any-agent-rl[{name}]"'):
            require_trackers([name])


def test_a_run_is_tracked_while_it_trains(
    fake: type[Fake], tiny_model_dir: Path, tmp_path: Path
) -> None:
    settings = [f"root={tmp_path}", f"model.path={tiny_model_dir}", "tracking.to=wandb"]
    fake.broken = lambda number: number == 3
    lab = Lab(config_of(settings, "train.steps=3"), [pair(f"p{k}") for k in range(3)])
    assert lab.trainer.train(), "a tracker that fails stops nothing"
    assert fake.got == [(1, 1), (2, 2)]
    assert (
        '_tracker_failures_total{tracker="wandb"} 1'
        in lab.trainer.metrics.exposition().render().decode()
    )
    fake.broken = lambda number: False
    again = Lab(config_of(settings, "train.steps=4"), [pair("p3", version=3)], before=lab)
    assert again.trainer.train()
    assert fake.got == [(k, k) for k in (1, 2, 3, 4)]
