"""Another node of a job, alone: how it ends; stand-ins for its parts and Slurm's programs."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from any_agent.launcher import journal_storage as journals
from any_agent.launcher.slurm import worker_node as member
from any_agent.launcher.slurm.job import mark
from any_agent.launcher.trial import trial_dir
from any_agent.rundir.layout import RunDir
from any_agent.rundir.registry import HEARTBEAT, RegistryEntry, publish, read_entry
from tests.support.launcher.children import until
from tests.support.launcher.slurm_programs import Programs
from tests.support.launcher.stand_ins import Lab

pytestmark = pytest.mark.service


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """A member is the whole of its process, a test is not."""
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def run(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run's folder as the first node has made it; the member's command line is that of n2."""
    Programs(tmp_path / "slurm", monkeypatch)
    monkeypatch.setenv("ANY_AGENT_SERVER__ADMIN_KEY", "a-secret-key")
    config = lab.config(f"server.journal_dir={lab.home / 'local'}")
    run = trial_dir(config)
    run.create()
    run.resolved.write_text(yaml.safe_dump(config.dump()))
    words = ["member", "--config", str(run.resolved), "--token", mark(run), "--start", "s-1"]
    words += ["--public-url", "http://127.0.0.1:8000"]
    monkeypatch.setattr(sys, "argv", words)
    return run


def told(lab: Lab, number: signal.Signals, *, after: str) -> threading.Thread:
    """Send it when that part has begun."""

    def send() -> None:
        until(lambda: after in lab.names("starts"))
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_trainer_that_somebody_ends_is_not_done(
    lab: Lab, run: RunDir, number: signal.Signals
) -> None:
    """Code 0 is what a part says whose steps are all made."""
    sys.argv += ["--role", json.dumps({"index": 1, "node": "n2", "training": 0})]
    thread = told(lab, number, after="trainer")
    assert member.main() == 143
    thread.join()
    assert lab.names("ends") == ["trainer"]


def test_no_signal_interrupts_the_copy_of_the_journals(
    lab: Lab, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first node tells a member twice to end at once, when it has no more time."""
    copied = []
    real = journals.store_journals

    def leave(*arguments: Any) -> None:
        for number in (signal.SIGUSR2, signal.SIGUSR1, signal.SIGTERM):
            os.kill(os.getpid(), number)
        real(*arguments)
        copied.append(True)

    monkeypatch.setattr(journals, "store_journals", leave)
    sys.argv += ["--role", json.dumps({"index": 1, "node": "n2", "ranks": [0, 1]})]
    thread = told(lab, signal.SIGUSR2, after="rank-1")
    assert member.main() == 130
    thread.join()
    assert copied == [True]


def test_an_earlier_start_of_a_node_ends_for_a_later_one(
    lab: Lab, run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody can end it where its node cannot be reached for a while."""
    sys.argv += ["--role", json.dumps({"index": 1, "node": "n2", "ranks": [0, 1]})]

    def replace() -> None:
        until(lambda: "rank-1" in lab.names("starts"))
        entry = read_entry(run.registry, "node-1")
        assert entry is not None and entry.boot_id == "s-1"
        # What another job has left, and what came before it, does not count.
        for start in ("t-9", "s-0", "s-2"):
            publish(run.registry, entry.model_copy(update={"boot_id": start}))
            time.sleep(1.5 * HEARTBEAT)

    thread = threading.Thread(target=replace)
    thread.start()
    assert member.main() == 1
    thread.join()
    assert "node-1 was started again" in capsys.readouterr().err
    entry = read_entry(run.registry, "node-1")
    assert entry is not None and entry.boot_id == "s-2"
    assert {"rank-0", "rank-1"} <= set(lab.names("ends"))


def test_gpus_that_others_have_are_left_to_them(
    lab: Lab, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    role = {"index": 1, "node": "n2", "ranks": [0, 1], "gpus_taken": 1}
    sys.argv += ["--role", json.dumps(role)]
    thread = told(lab, signal.SIGUSR2, after="rank-1")
    assert member.main() == 130
    thread.join()
    engines = [event for event in lab.events("starts") if event["part"] == "engine"]
    # Two processes write their starts, in any order.
    assert sorted(event["gpus"] for event in engines) == ["1", "2"]


@pytest.mark.parametrize("again", [True, False])
def test_a_node_whose_first_node_is_lost_has_the_job_queued_again(
    lab: Lab, run: RunDir, monkeypatch: pytest.MonkeyPatch, again: bool, tmp_path: Path
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("ANY_AGENT_SERVER__JOURNAL", "redis://127.0.0.1:1/0")
    monkeypatch.setattr(member, "HEAD_TIMEOUT", 2.0)
    settings = yaml.safe_load(run.resolved.read_text())
    settings["cluster"]["requeue"] = again
    run.resolved.write_text(yaml.safe_dump(settings))
    sys.argv += ["--role", json.dumps({"index": 1, "node": "n2", "ranks": [0, 1]})]
    router = RegistryEntry(name="router", boot_id="b", url="http://unused", pid=1)
    beats = 4

    def beat() -> None:
        until(lambda: "rank-1" in lab.names("starts"))
        for _ in range(beats):
            publish(run.registry, router)
            time.sleep(HEARTBEAT)

    thread = threading.Thread(target=beat)
    began = time.monotonic()
    thread.start()
    assert member.main() == 1
    thread.join()
    assert time.monotonic() - began > beats * HEARTBEAT
    requeued = tmp_path / "slurm" / "requeued"
    assert (requeued.read_text().split() if requeued.exists() else []) == ["7"] * again
    assert {"rank-0", "rank-1"} <= set(lab.names("ends"))
