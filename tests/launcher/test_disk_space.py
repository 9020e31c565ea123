"""A rank whose disk is full."""

from __future__ import annotations

from pathlib import Path

from any_agent.launcher.disk_space import DiskSpaceMonitor
from any_agent.rundir.registry import RegistryEntry, publish


def test_a_full_disk_and_its_end_are_said_once(tmp_path: Path) -> None:
    now, said = 0.0, list[str]()
    room = DiskSpaceMonitor(tmp_path, said.append, clock=lambda: now)

    def rank(full: bool) -> None:
        nonlocal now
        publish(
            tmp_path,
            RegistryEntry(name="rank-0", boot_id="b", url="http://x", pid=1, store_full=full),
        )
        for _ in range(3):
            now += 2.0
            room.look()

    for full in (False, True, False):
        rank(full)
    assert said == [
        "rank 0    its disk is full: calls get 507 until there is space",
        "rank 0    its disk has space again",
    ]
