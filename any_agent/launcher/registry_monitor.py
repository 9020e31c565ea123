"""A monitor of a run's registry and folders: parts that hang, full disks, damaged weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from any_agent.launcher.component import Component
from any_agent.rundir.checksums import damaged_folders
from any_agent.rundir.layout import RunDir
from any_agent.rundir.registry import (
    HEARTBEAT,
    SILENT_AFTER,
    Registry,
    Stamp,
    rank_name,
    read_stamp,
)

SILENCE_TIMEOUT = 30.0  # seconds without a heartbeat after which a part is killed
ROUTER_TIMEOUT = 3.0
"""The same of the router, without which nobody is served. It restarts within a second or two and
keeps no state. Only time in which another part is heard counts: a disk that stalls, or a machine
that stands still, silences all of them."""


@dataclass(slots=True)
class _Heartbeat:
    id: tuple[int, Stamp]
    """The process's id, and the stamp of its last entry."""
    silence: float = 0.0
    """Seconds since the entry changed."""
    alone: float = 0.0
    """Seconds of silence in which another part's entry changed."""


@dataclass(eq=False)
class RegistryMonitor:
    """Kills a ready part that no longer writes its registry entry, and an engine that hangs.

    Engines write no entry: each one's rank writes for how long it has not answered. It also prints
    a line when the disk of a part is full, when it has space again, and when a part set damaged
    weights or a damaged checkpoint aside.
    """

    folder: Path
    """The run's registry."""
    parts: Mapping[str, Component]
    say: Callable[[str], None]
    hung_after: float = SILENCE_TIMEOUT
    """Seconds without an answer after which an engine is killed."""
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._registry = Registry(self.folder)
        self._polled_at = self.clock()
        self._heartbeats: dict[str, _Heartbeat] = {}
        self._full: set[str] = set()
        self._hung: set[str] = set()
        self._damaged = self._set_aside()

    def poll(self) -> None:
        """Check every entry, at most once per heartbeat; call it several times a second."""
        now = self.clock()
        passed = now - self._polled_at
        if passed < HEARTBEAT:
            return
        self._polled_at = now
        for ended in self._heartbeats.keys() - self.parts.keys():
            del self._heartbeats[ended]
        for part in self.parts.values():
            # During a longer pause of this process the others may have been suspended, too.
            self._measure_silence(part, min(passed, 2 * HEARTBEAT))
        self._check_router(min(passed, 2 * HEARTBEAT))
        # If all parts are silent, the disk accepts no writes, or does not show them.
        if any(beat.silence < SILENT_AFTER for beat in self._heartbeats.values()):
            silent = [n for n, b in self._heartbeats.items() if b.silence >= SILENCE_TIMEOUT]
            for name in silent:
                del self._heartbeats[name]
                self.parts[name].kill(f"has sent no heartbeat for {SILENCE_TIMEOUT:g} s")
        self._registry.refresh()
        self._check_engines()
        self._check_disks()
        self._check_damage()

    def _check_router(self, passed: float) -> None:
        router = self._heartbeats.get("router")
        if router is None or not router.silence:
            return
        if any(not beat.silence for beat in self._heartbeats.values()):
            router.alone += passed
        if router.alone >= ROUTER_TIMEOUT:
            del self._heartbeats["router"]
            self.parts["router"].kill(f"has sent no heartbeat for {ROUTER_TIMEOUT:g} s")

    def _measure_silence(self, part: Component, passed: float) -> None:
        stamp = read_stamp(self.folder, part.name) if part.state == "ready" else None
        if stamp is None:
            self._heartbeats.pop(part.name, None)
            return
        beat = self._heartbeats.get(part.name)
        if beat is None or beat.id != (part.pid, stamp):
            self._heartbeats[part.name] = _Heartbeat((part.pid, stamp))
        else:
            beat.silence += passed

    def _check_engines(self) -> None:
        for name, engine in self.parts.items():
            if not name.startswith("engine-"):
                continue
            rank = rank_name(int(name.rpartition("-")[2]))
            entry = self._registry.get(rank)
            if entry is None or entry.engine_silence < self.hung_after:
                self._hung.discard(name)
            # Killed once: the entry is a moment older than the engine's next start.
            elif name not in self._hung and engine.state == "ready" and self._registry.alive(rank):
                self._hung.add(name)
                engine.kill(f"has not answered for {self.hung_after:g} s")

    def _check_disks(self) -> None:
        for entry in self._registry.entries():
            label = f"{entry.name.replace('-', ' '):<9}"
            full = "its disk is full: calls get 507 until there is space"
            why = full if entry.store_full else entry.disk_full
            if why and entry.name not in self._full:
                self._full.add(entry.name)
                self.say(f"{label} {why}")
            elif not why and entry.name in self._full:
                self._full.remove(entry.name)
                self.say(f"{label} its disk has space again")

    def _check_damage(self) -> None:
        now = self._set_aside()
        for path in sorted(now - self._damaged):
            self.say(
                f"run       damaged weights were set aside as {path}: the newest whole ones are "
                f"used instead; the reason is in the logs in {self.folder.parent / 'logs'}"
            )
        self._damaged = now

    def _set_aside(self) -> set[Path]:
        run = RunDir(self.folder.parent)
        roots = (run.checkpoints, run.weights, run.adapters)
        return {root / name for root in roots for name in damaged_folders(root)}
