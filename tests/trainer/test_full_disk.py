"""A disk that is full at any write of the trainer delays it, and changes nothing else."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from any_agent.rundir.layout import RunDir
from any_agent.rundir.registry import RegistryEntry, publish, read_entry
from any_agent.runtime import disk_space
from any_agent.runtime.disk_space import is_disk_full
from tests.support.small_disk import Disk, small_disk
from tests.support.trainer.loop import (
    RUN,
    STEPS,
    Lab,
    Method,
    assert_same_outcome,
    config_of,
    episodes,
    outcome,
    settings_of,
)
from trainer.manifests import ManifestStore

BOUNDARIES = ("lease", "manifest", "step", "published", "ack", "before checkpoint")


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    monkeypatch.setattr(disk_space, "POLL_INTERVAL", 0.02)
    with small_disk(tmp_path / "disk", 48 << 20) as disk:
        yield disk


@pytest.fixture
def settings(tiny_model_dir: Path, disk: Disk) -> list[str]:
    return settings_of(disk.folder, tiny_model_dir)


class Helper:
    """Makes room, in a thread of its own, or does another thing, once the trainer waits."""

    def __init__(self, lab: Lab, disk: Disk, act: Callable[[], None] | None = None) -> None:
        self.lab, self.disk, self.act = lab, disk, act or disk.make_room
        self.waits: list[str] = []
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._run)

    def fill(self) -> None:
        self.disk.fill()
        self.thread.start()

    def _run(self) -> None:
        while not self.over.wait(0.01):
            if (wait := self.lab.trainer.disk.waiting) is not None:
                self.waits.append(str(wait))
                self.act()
                return


def filled(fill: Callable[[], None], when: int) -> Callable[[Method, bool], Method]:
    """The method, and a full disk after it is called for the n-th time, or before the first."""

    def change(method: Method, before: bool) -> Method:
        calls = count(1)

        def filling(*args: Any, **kwargs: Any) -> Any:
            now = next(calls) == (1 if before else when)
            if before and now:
                fill()
            result = method(*args, **kwargs)
            if now and not before:
                fill()
            return result

        return filling

    return change


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_training_waits_for_a_full_disk_and_goes_on_exactly(
    settings: list[str], disk: Disk, uninterrupted: dict[str, Any], boundary: str
) -> None:
    lab = Lab(config_of(settings, *RUN), episodes())
    helper = Helper(lab, disk)
    lab.at(boundary, filled(helper.fill, 2))
    try:
        assert lab.trainer.train()
    finally:
        helper.over.set()
        helper.thread.join(60)
    assert len(helper.waits) == 1 and helper.waits[0].startswith("disk full")
    assert lab.trainer.disk.waiting is None
    assert_same_outcome(uninterrupted, outcome(lab))
    assert [line["step"] for line in lab.metrics] == list(range(1, STEPS + 1))
    # Nothing half-written stays, and no version was numbered twice or left out.
    assert not [p for p in disk.folder.rglob("*") if p.name.startswith(".partial")]
    assert [version for version, _ in lab.service.published] == list(range(1, STEPS + 1))


def test_a_stop_ends_the_wait_and_the_next_start_repeats_the_step(
    settings: list[str], disk: Disk, uninterrupted: dict[str, Any]
) -> None:
    lab = Lab(config_of(settings, *RUN), episodes())
    stopping = Helper(lab, disk, lab.trainer.stop)
    lab.at("step", filled(stopping.fill, 3))
    assert not lab.trainer.train()
    stopping.thread.join(60)
    # The step was made, but neither published nor acknowledged: its manifest has it.
    assert ManifestStore(lab.trainer.dir.manifests).steps() == [3]
    disk.make_room()
    again = lab.again()
    assert again.trainer.train()
    assert_same_outcome(uninterrupted, outcome(again))


def test_a_stop_ends_the_wait_for_the_first_write_of_all(settings: list[str], disk: Disk) -> None:
    lab = Lab(config_of(settings, *RUN), episodes())
    load = lab.trainer.load

    def loaded() -> None:
        load()
        disk.fill()
        lab.trainer.stop()

    lab.trainer.load = loaded  # type: ignore[method-assign]
    assert not lab.trainer.train()
    assert lab.trainer.disk.waiting is None


def test_space_is_measured_on_the_disk_that_a_linked_folder_lies_on(
    settings: list[str], disk: Disk, tmp_path: Path
) -> None:
    """Checkpoints lie on a large disk, the rest of the run on one that has no room for any."""
    config = config_of(settings, *RUN)
    folder = RunDir.of(config.root, config.user, config.experiment, config.trial)
    folder.path.mkdir(parents=True)
    for own in (folder.checkpoints, folder.weights, folder.manifests):
        (tmp_path / own.name).mkdir()
        own.symlink_to(tmp_path / own.name)
    lab = Lab(config, episodes())

    def little_room() -> None:
        free = shutil.disk_usage(disk.folder).free
        (disk.folder / "large").write_bytes(bytes(free - (200 << 10)))

    lab.at("before lease", filled(little_room, 1))
    timer = threading.Timer(60, lab.trainer.stop)
    timer.start()
    try:
        assert lab.trainer.train()
    finally:
        timer.cancel()


def test_a_registry_entry_can_be_written_on_a_full_disk(disk: Disk) -> None:
    entry = RegistryEntry(name="rank-0", boot_id="a", url="http://127.0.0.1:1", pid=7)
    publish(disk.folder, entry)
    before = (disk.folder / "rank-0.json").stat().st_mtime_ns
    disk.fill()
    for full in ("disk full: the checkpoint waits for space", None):
        now = entry.model_copy(update={"store_full": True, "disk_full": full})
        publish(disk.folder, now)
        assert read_entry(disk.folder, "rank-0") == now
    assert (disk.folder / "rank-0.json").stat().st_mtime_ns > before
    assert {p.name for p in disk.folder.iterdir()} == {"rank-0.json", "filler"}
    with pytest.raises(OSError) as raised:
        publish(disk.folder, entry.model_copy(update={"name": "rank-1"}))
    assert is_disk_full(raised.value)
    assert not list(disk.folder.glob(".rank*"))
