"""Another node of a job, alone: how it ends; stand-ins for its parts and Slurm's programs."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
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

pytestmark = [pytest.mark.service, pytest.mark.usefixtures("handlers", "programs")]


@pytest.fixture
def run(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run's folder as the first node has made it; the member's command line is that of n2."""
    monkeypatch.setenv("ANY_AGENT_SERVER__ADMIN_KEY", "a-secret-key")
    config = lab.config(f"server.journal_dir={lab.home / 'local'}")
    run = trial_dir(config)
    run.create()
    run.resolved.write_text(yaml.safe_dump(config.dump()))
    words = ["member", "--config", str(run.resolved), "--token", mark(run), "--start", "s-1"]
    words += ["--public-url", "http://127.0.0.1:8000"]
    monkeypatch.setattr(sys, "argv", words)
    return run


RANKS = {"ranks": [0, 1]}


def member_of(role: dict[str, Any], meanwhile: Callable[[], None]) -> int:
    """Run the member in this role, and something in a thread beside it; the exit code."""
    sys.argv += ["--role", json.dumps({"index": 1, "node": "n2", **role})]
    thread = threading.Thread(target=meanwhile)
    thread.start()
    try:
        return member.main()
    finally:
        thread.join()


def told(lab: Lab, number: signal.Signals, *, after: str) -> Callable[[], None]:
    """Send the signal when that part has begun."""

    def send() -> None:
        until(lambda: after in lab.names("starts"))
        os.kill(os.getpid(), number)

    return send


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_trainer_that_somebody_ends_is_not_done(
    lab: Lab, run: RunDir, number: signal.Signals
) -> None:
    """Code 0 is what a part says whose steps are all made."""
    assert member_of({"training": 0}, told(lab, number, after="trainer")) == 143
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
    assert member_of(RANKS, told(lab, signal.SIGUSR2, after="rank-1")) == 130
    assert copied == [True]


def test_an_earlier_start_of_a_node_ends_for_a_later_one(
    lab: Lab, run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody can end it where its node cannot be reached for a while."""

    def replace() -> None:
        until(lambda: "rank-1" in lab.names("starts"))
        entry = read_entry(run.registry, "node-1")
        assert entry is not None and entry.boot_id == "s-1"
        # What another job has left, and what came before it, does not count.
        for start in ("t-9", "s-0", "s-2"):
            publish(run.registry, entry.model_copy(update={"boot_id": start}))
            time.sleep(1.5 * HEARTBEAT)

    assert member_of(RANKS, replace) == 1
    assert "node-1 was started again" in capsys.readouterr().err
    entry = read_entry(run.registry, "node-1")
    assert entry is not None and entry.boot_id == "s-2"
    assert {"rank-0", "rank-1"} <= set(lab.names("ends"))


def test_gpus_that_others_have_are_left_to_them(
    lab: Lab, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    role = RANKS | {"gpus_taken": 1}
    assert member_of(role, told(lab, signal.SIGUSR2, after="rank-1")) == 130
    engines = [event for event in lab.events("starts") if event["part"] == "engine"]
    # Two processes write their starts, in any order.
    assert sorted(event["gpus"] for event in engines) == ["1", "2"]


@pytest.mark.parametrize("again", [True, False])
def test_a_node_whose_first_node_is_lost_has_the_job_queued_again(
    lab: Lab, run: RunDir, programs: Programs, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("ANY_AGENT_SERVER__JOURNAL", "redis://127.0.0.1:1/0")
    monkeypatch.setattr(member, "HEAD_TIMEOUT", 2.0)
    settings = yaml.safe_load(run.resolved.read_text())
    settings["cluster"]["requeue"] = again
    run.resolved.write_text(yaml.safe_dump(settings))
    router = RegistryEntry(name="router", boot_id="b", url="http://unused", pid=1)
    beats = 4

    def beat() -> None:
        until(lambda: "rank-1" in lab.names("starts"))
        for _ in range(beats):
            publish(run.registry, router)
            time.sleep(HEARTBEAT)

    began = time.monotonic()
    assert member_of(RANKS, beat) == 1
    assert time.monotonic() - began > beats * HEARTBEAT
    assert programs.requeued == ["7"] * again
    assert {"rank-0", "rank-1"} <= set(lab.names("ends"))
