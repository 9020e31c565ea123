"""The peak memory of this process and its descendants."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

import psutil


class PeakMemory:
    """Samples the resident memory of the process tree twice a second."""

    def __init__(self, interval: float = 0.5) -> None:
        self._interval = interval
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="memory", daemon=True)
        self.peak_mib = 0.0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._end.wait(self._interval):
            self.peak_mib = max(self.peak_mib, _tree_mib())


def _tree_mib() -> float:
    root = psutil.Process()
    total = 0
    for process in [root, *root.children(recursive=True)]:
        try:
            total += process.memory_info().rss
        except psutil.Error:
            continue
    return total / 2**20
