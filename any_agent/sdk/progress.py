"""The progress of a runner: its counts, and a bar on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

_INTERVAL = 0.2
"""Seconds between two drawings of the bar."""
_WIDTH = 24


@dataclass(slots=True)
class RunProgress:
    """Counts of runs; each is one member of an item's group in one epoch."""

    total: int
    done: int = 0
    failed: int = 0
    """Failed runs among those that are done."""
    running: int = 0
    rewarded: int = 0
    rewards: float = 0.0
    """The sum of the rewards so far."""

    @property
    def mean(self) -> float | None:
        """The mean reward so far; None before the first."""
        return self.rewards / self.rewarded if self.rewarded else None


class ProgressBar:
    """A progress bar on one line of a terminal, which each drawing replaces."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._began = time.monotonic()
        self._next = 0.0
        self._drawn = 0

    def __call__(self, progress: RunProgress) -> None:
        now = time.monotonic()
        if now >= self._next or progress.done == progress.total:
            self._next = now + _INTERVAL
            self._draw(self._line(progress, now))

    def end(self) -> None:
        """Keep the line, and begin the next one."""
        if self._drawn:
            self._stream.write("\n")
            self._stream.flush()
            self._drawn = 0

    def _line(self, progress: RunProgress, now: float) -> str:
        share = progress.done / progress.total if progress.total else 1.0
        filled = int(share * _WIDTH)
        seconds = now - self._began
        rate = progress.done / seconds if seconds > 0 else 0.0
        parts = [
            f"{'#' * filled}{'.' * (_WIDTH - filled)} {progress.done}/{progress.total} runs",
            f"{progress.running} running",
            f"{rate:.1f}/s",
        ]
        if progress.failed:
            parts.append(f"{progress.failed} failed")
        if progress.mean is not None:
            parts.append(f"mean reward {progress.mean:.3f}")
        return " | ".join(parts)

    def _draw(self, line: str) -> None:
        self._stream.write("\r" + line.ljust(self._drawn))
        self._stream.flush()
        self._drawn = len(line)


def progress_callback(
    progress: bool | Callable[[RunProgress], object] | None,
) -> Callable[[RunProgress], object]:
    """Return the callback for changes: the caller's own; a bar for True, and, where there is a
    terminal, for None; one without effect for False."""
    if callable(progress):
        return progress
    if progress or (progress is None and sys.stderr.isatty()):
        return ProgressBar()
    return lambda _: None
