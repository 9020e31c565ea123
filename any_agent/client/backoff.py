"""Waits that spread: so that clients refused together do not all come back together."""

from __future__ import annotations

import random

_random = random.Random()
"""Its own: a process that trains keeps the global generator in its checkpoints."""


def jittered(seconds: float, low: float = 0.5, high: float = 1.5) -> float:
    """``seconds`` times a random factor."""
    return seconds * _random.uniform(low, high)
