"""Disks without room, told to whoever sees the launcher's output."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from any_agent.rundir.registry import HEARTBEAT, Registry


class DiskSpaceMonitor:
    """Says once when a rank's journal has no room left, and once when it has some again."""

    def __init__(
        self,
        registry: Path,
        say: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = Registry(registry)
        self._say = say
        self._clock = clock
        self._looked = clock()
        self._full: set[str] = set()

    def look(self) -> None:
        """Look once; to be called several times a second."""
        now = self._clock()
        if now - self._looked < HEARTBEAT:
            return
        self._looked = now
        self._registry.refresh()
        for entry in self._registry.entries():
            label = f"{entry.name.replace('-', ' '):<9}"
            if entry.store_full and entry.name not in self._full:
                self._full.add(entry.name)
                self._say(f"{label} its disk is full: calls get 507 until there is space")
            elif not entry.store_full and entry.name in self._full:
                self._full.remove(entry.name)
                self._say(f"{label} its disk has space again")
