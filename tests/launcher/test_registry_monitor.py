"""Which parts are taken for hung, and disks that are full. Clock and parts are the test's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

import pytest

from any_agent.launcher.component import Component
from any_agent.launcher.registry_monitor import SILENCE_TIMEOUT as TIMEOUT
from any_agent.launcher.registry_monitor import RegistryMonitor
from any_agent.rundir.checksums import sound
from any_agent.rundir.layout import RunDir
from any_agent.rundir.registry import RegistryEntry, publish


class FakePart:
    """Ready, and writes its entry when it is told to."""

    def __init__(self, lab: Lab, name: str) -> None:
        self._lab = lab
        self.name = name
        self.state = "ready"
        self.pid = 1
        self.killed: list[str] = []

    def beat(self) -> None:
        path = self._lab.registry / f"{self.name}.json"
        path.touch()
        self._lab.beats += 1
        os.utime(path, ns=(0, self._lab.beats))

    def kill(self, why: str) -> None:
        self.killed.append(why)


class Lab:
    def __init__(self, registry: Path) -> None:
        self.registry = registry
        self.now = 0.0
        self.beats = 0
        self.parts = {name: FakePart(self, name) for name in ("engine-0", "rank-0", "trainer")}
        self.router = FakePart(self, "router")
        self.rank, self.trainer = self.parts["rank-0"], self.parts["trainer"]
        parts = cast(dict[str, Component], self.parts)
        self.monitor = RegistryMonitor(registry, parts, print, clock=lambda: self.now)
        self.rank.beat()
        self.trainer.beat()

    def pass_(self, seconds: float, *alive: FakePart, step: float = 0.5) -> None:
        """Let time go by, with these parts at work and somebody looking."""
        for _ in range(round(seconds / step)):
            self.now += step
            for part in alive:
                part.beat()
            self.monitor.poll()

    @property
    def killed(self) -> list[str]:
        return [name for name, part in self.parts.items() for _ in part.killed]


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def test_a_part_that_is_silent_too_long_is_killed(lab: Lab) -> None:
    lab.pass_(100, lab.rank, lab.trainer)
    # The last beat is heard at the next look.
    lab.pass_(TIMEOUT - 1, lab.trainer)
    assert lab.killed == []
    lab.pass_(3, lab.trainer)
    assert lab.killed == ["rank-0"]
    lab.pass_(2 * (TIMEOUT + 5), lab.trainer)
    assert lab.killed == ["rank-0"] * 3, "one that cannot be killed is not killed all the time"


def test_a_silent_router_is_killed_within_five_seconds(lab: Lab) -> None:
    lab.parts["router"] = lab.router
    lab.pass_(20, lab.rank, lab.trainer, lab.router)
    lab.pass_(2.5, lab.rank, lab.trainer)
    assert lab.killed == []
    lab.pass_(2.5, lab.rank, lab.trainer)
    assert lab.killed == ["router"]
    # Killed once: its next life writes another entry.
    lab.router.pid = 2
    lab.pass_(TIMEOUT, lab.rank, lab.trainer, lab.router)
    assert lab.killed == ["router"]


def test_a_disk_that_stalls_kills_no_router(lab: Lab) -> None:
    """All write again once it goes on, the router perhaps a moment later than the others."""
    lab.parts["router"] = lab.router
    for _ in range(10):
        lab.pass_(5, lab.rank, lab.trainer, lab.router)
        lab.pass_(TIMEOUT / 2)
        lab.pass_(1, lab.rank, lab.trainer)
    assert lab.killed == []


def test_when_nobody_is_heard_nobody_is_killed(lab: Lab) -> None:
    """A full disk silences all of them."""
    lab.pass_(100, lab.rank, lab.trainer)
    lab.pass_(10 * TIMEOUT)
    assert lab.killed == []


def test_time_in_which_nobody_looked_does_not_count(lab: Lab) -> None:
    """A machine that was suspended, or a container: its parts were, too."""
    lab.pass_(10, lab.rank, lab.trainer)
    lab.now += 100 * TIMEOUT
    lab.trainer.beat()
    lab.monitor.poll()
    lab.pass_(10, lab.rank, lab.trainer)
    assert lab.killed == []


def test_each_life_has_its_own_time_once_it_is_ready(lab: Lab) -> None:
    lab.pass_(TIMEOUT - 5, lab.trainer)
    lab.rank.state = "restarting"
    lab.pass_(2 * TIMEOUT, lab.trainer)
    lab.rank.state = "ready"
    lab.pass_(TIMEOUT - 5, lab.trainer)
    lab.rank.pid = 2
    lab.pass_(TIMEOUT - 5, lab.trainer)
    assert lab.killed == []


def test_a_full_disk_and_its_end_are_said_once(tmp_path: Path) -> None:
    now, said = 0.0, list[str]()
    monitor = RegistryMonitor(tmp_path, {}, said.append, clock=lambda: now)
    why = "disk full: the checkpoint waits"
    for full in (False, True, True, False, False):
        for name, told in (("rank-0", {"store_full": full}), ("trainer", {"disk_full": why})):
            entry = RegistryEntry(name=name, boot_id="b", url="http://x", pid=1)
            publish(tmp_path, entry.model_copy(update=told if full else {}))
        now += 2.0
        monitor.poll()
    lines = [(line.partition("  ")[0], "space again" in line) for line in said]
    assert sorted(lines) == [(n, b) for n in ("rank 0", "trainer") for b in (False, True)]


def test_an_engine_that_its_rank_hears_nothing_of_is_killed_once(lab: Lab) -> None:
    entry = RegistryEntry(name="rank-0", boot_id="b", url="http://x", pid=1)
    engine = lab.parts["engine-0"]

    def rank_says(silence: float, seconds: float = 3) -> None:
        for _ in range(round(seconds)):
            publish(lab.registry, entry.model_copy(update={"engine_silence": silence}))
            lab.pass_(1, lab.trainer)

    rank_says(TIMEOUT - 1, 60)
    assert lab.killed == []
    engine.state = "starting"
    rank_says(TIMEOUT + 1)
    assert lab.killed == []
    engine.state = "ready"
    rank_says(TIMEOUT + 1, 20)
    assert lab.killed == ["engine-0"]
    rank_says(0.0)
    rank_says(TIMEOUT + 1)
    assert lab.killed == ["engine-0"] * 2


def test_weights_that_are_set_aside_are_said_once(tmp_path: Path) -> None:
    now, said = 0.0, list[str]()
    run = RunDir(tmp_path / "run")
    run.create()
    (run.checkpoints / "damaged-step-00000001").mkdir()
    monitor = RegistryMonitor(run.registry, {}, said.append, clock=lambda: now)
    for folder in (run.checkpoints / "step-00000002", run.weights / "v00000003"):
        folder.mkdir()
        (folder / "config.json").write_text("{")
        assert not sound(folder)
        for _ in range(3):
            now += 2.0
            monitor.poll()
    assert len(said) == 2, "none of an earlier start"
    assert str(run.checkpoints / "damaged-step-00000002") in said[0]
    assert str(run.weights / "damaged-v00000003") in said[1]
