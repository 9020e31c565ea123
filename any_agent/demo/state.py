"""What is known of the demo now. Filled by `run.py`, shown by `display.py` and `plain.py`."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from any_agent.demo.driver import Measures
from any_agent.protocol import Capacity


@dataclass(frozen=True, slots=True)
class Part:
    """One process of the service, as the launcher sees it."""

    name: str
    state: str = "waiting"
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """One line of `metrics.jsonl`."""

    number: int
    reward: float
    """Mean score of the step's sessions."""
    version: int
    staleness: float
    """Steps that its tokens were behind, on average."""
    trained: int
    """Sessions."""
    left_out: int
    """Sessions of its batch that it rejected."""
    rejected: int
    """Sessions that this life of the trainer rejected before they came into a batch."""
    wait: float
    train: float

    @classmethod
    def of(cls, line: dict[str, Any]) -> Self:
        return cls(
            number=int(line["step"]),
            reward=float(line["reward"]),
            version=int(line["version"]),
            staleness=float(line["staleness_mean"]),
            trained=int(line["sessions"]),
            left_out=sum(line["left_out"].values()),
            rejected=sum(line["rejected"].values()),
            wait=float(line["seconds"]["wait"]),
            train=float(line["seconds"]["train"]),
        )


@dataclass(frozen=True, slots=True)
class State:
    """Everything that is shown, at one moment."""

    seed: int
    ranks: int
    steps: int
    folder: str
    phase: str = "making a tiny model"
    elapsed: float = 0.0
    """Seconds."""
    url: str = ""
    parts: tuple[Part, ...] = ()
    history: tuple[Step, ...] = ()
    """In the order of the steps; one that a restarted trainer made again counts once."""
    capacity: Capacity | None = None
    tokens_per_second: float = 0.0
    prompts: int = 0
    """Sessions of one evaluation."""
    asked: int = 0
    """How many of them have ended in the evaluation under way."""
    before: Measures | None = None
    after: Measures | None = None

    @property
    def step(self) -> int:
        return self.history[-1].number if self.history else 0

    @property
    def rewards(self) -> list[float]:
        return [step.reward for step in self.history]

    @property
    def trained(self) -> int:
        return sum(step.trained for step in self.history)

    @property
    def rejected(self) -> int:
        """Sessions that taught nothing. The trainer's own count begins anew with each life."""
        counts = [step.rejected for step in self.history]
        lives = [a for a, b in pairwise(counts) if b < a]
        return sum(step.left_out for step in self.history) + sum(lives) + sum(counts[-1:])

    def plus(self, steps: Sequence[Step]) -> State:
        """With new lines of `metrics.jsonl`; the newest line of a step counts."""
        return replace(self, history=by_number([*self.history, *steps]))


def by_number(steps: Sequence[Step]) -> tuple[Step, ...]:
    """In order, each number once: a restarted trainer makes steps again, and its last count."""
    known = {step.number: step for step in steps}
    return tuple(known[number] for number in sorted(known))


class Metrics:
    """Reads `metrics.jsonl` as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> list[Step]:
        """The steps since the last call; a line half-written is left for the next one."""
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            *lines, rest = file.read().split(b"\n")
            self._offset = file.tell() - len(rest)
        return [Step.of(json.loads(line)) for line in lines]


class Rate:
    """How fast a count grows: over the last ``seconds``, or since it began."""

    def __init__(self, seconds: float = 5.0) -> None:
        self._seconds = seconds
        self._seen: deque[tuple[float, float]] = deque()

    def add(self, count: float, now: float | None = None) -> float:
        """Note the count; its growth per second. ``now``: monotonic seconds."""
        at = time.monotonic() if now is None else now
        self._seen.append((at, count))
        while len(self._seen) > 2 and self._seen[1][0] <= at - self._seconds:
            self._seen.popleft()
        began, first = self._seen[0]
        return (count - first) / (at - began) if at > began else 0.0
