"""What became of the calls of frozen models since the process began."""

from __future__ import annotations

from collections import Counter

from any_agent.runtime.metrics import Histogram

OUTCOMES = ("completed", "aborted", "failed")
SECONDS_BOUNDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class FrozenStats:
    """Tallies by model: as many as are configured."""

    def __init__(self) -> None:
        self.ended: Counter[tuple[str, str]] = Counter()
        """By model and outcome."""
        self.seconds = Histogram(SECONDS_BOUNDS)
        """Of completed calls, recorded."""
        self.input_tokens: Counter[str] = Counter()
        self.output_tokens: Counter[str] = Counter()
        self.usd: dict[str, float] = {}
        self.unpriced: Counter[str] = Counter()
        """Calls whose cost is not known."""
        self.turned_away = 0
        """For want of a place."""
