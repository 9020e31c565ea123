"""The seconds of training by phase."""

from __future__ import annotations

import time
from collections import defaultdict

import torch


class StepClock:
    """Divides the time since its start into phases, without gaps: each lap ends one.

    ``device``: a GPU's work is waited for at the end of a phase, which its time belongs to.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.start()

    def start(self) -> None:
        """Forget what was measured, and begin now."""
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._began = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Add the time since the last lap to this phase."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        self._seconds[phase] += now - self._began
        self._began = now

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase since they were last taken."""
        taken = dict(self._seconds)
        self._seconds.clear()
        return taken
