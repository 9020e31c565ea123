"""The parts' metrics as numbers, and rates between two scrapes."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterator, Mapping

_SAMPLE = re.compile(r"(any_agent_\w+)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
WANTED = re.compile(
    "any_agent_(sessions|slots_.*|calls_running|calls_limit|calls_total|output_tokens_total"
    "|undelivered_answers_total|journal_full|journal_log_away|journal_damaged_total"
    "|opens_refused_total|calls_refused_total|train_disk_full|train_tracker_failures_total"
    "|disk_free_bytes|disk_full_in_seconds|archive_removed_sessions_total"
    "|train_since_step_sessions|train_since_step_reward_mean)"
)
_WINDOW = 60.0  # seconds over which rates are taken
_SHORTEST = 0.5


class Samples:
    """The numbers of one part."""

    def __init__(self, text: str) -> None:
        """``text``: its metrics; those that no page shows are skipped."""
        self._by_name: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        for line in text.splitlines():
            match = None if line.startswith("#") else _SAMPLE.match(line)
            if match is None or not WANTED.fullmatch(match[1]):
                continue
            labels = dict(_LABEL.findall(match[2] or ""))
            self._by_name.setdefault(match[1], []).append((labels, float(match[3])))

    def sum(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples with these labels, 0 without any."""
        found = self._by_name.get(f"any_agent_{name}", ())
        return sum(value for own, value in found if labels.items() <= own.items())

    def each(self, name: str) -> Iterator[tuple[Mapping[str, str], float]]:
        return iter(self._by_name.get(f"any_agent_{name}", ()))


class Rates:
    """Counters over time, and how fast they have grown lately."""

    def __init__(self) -> None:
        self._past: deque[tuple[float, dict[str, float]]] = deque(maxlen=64)

    def add(self, counters: Mapping[str, float]) -> dict[str, float]:
        """Add a scrape; return the growth a second by counter, of those that can be told."""
        now = time.monotonic()
        past = self._past
        while past and now - past[0][0] > _WINDOW:
            past.popleft()
        rates: dict[str, float] = {}
        if past and now - past[0][0] >= _SHORTEST:
            then, before = past[0]
            for name, value in counters.items():
                # A counter that has shrunk is that of a part which has started again.
                if name in before and value >= before[name]:
                    rates[name] = (value - before[name]) / (now - then)
        past.append((now, dict(counters)))
        return rates
