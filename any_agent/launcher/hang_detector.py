"""Parts that hang: they were ready, and nothing is heard of them any more."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from any_agent.launcher.component import Component
from any_agent.rundir.registry import HEARTBEAT, SILENT_AFTER, Stamp, read_stamp

TIMEOUT = 30.0
"""Seconds of silence after which a part is killed."""


@dataclass(slots=True)
class _Heard:
    beat: tuple[int, Stamp]
    """The process's id and what tells one write of its entry from the next."""
    silence: float = 0.0
    """Seconds since it changed."""


class HangDetector:
    """Kills a ready part that has stopped to write its registry entry; engines write none."""

    def __init__(
        self,
        registry: Path,
        parts: Mapping[str, Component],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._parts = parts
        self._clock = clock
        self._looked = clock()
        self._heard: dict[str, _Heard] = {}

    def look(self) -> None:
        """Listen once; to be called several times a second."""
        now = self._clock()
        passed = now - self._looked
        if passed < HEARTBEAT:
            return
        self._looked = now
        for part in self._parts.values():
            # While nobody looked, the others may have been suspended as this process was.
            self._listen(part, min(passed, 2 * HEARTBEAT))
        # When none is heard, it is the disk that takes nothing, or nothing new.
        if any(heard.silence < SILENT_AFTER for heard in self._heard.values()):
            for name in [n for n, heard in self._heard.items() if heard.silence >= TIMEOUT]:
                del self._heard[name]
                self._parts[name].kill(f"has not been heard of for {TIMEOUT:g} s")

    def _listen(self, part: Component, passed: float) -> None:
        beat = self._beat(part) if part.state == "ready" else None
        if beat is None:
            self._heard.pop(part.name, None)
            return
        heard = self._heard.get(part.name)
        if heard is None or heard.beat != beat:
            self._heard[part.name] = _Heard(beat)
        else:
            heard.silence += passed

    def _beat(self, part: Component) -> tuple[int, Stamp] | None:
        stamp = read_stamp(self._registry, part.name)
        return None if stamp is None else (part.pid, stamp)
