"""What is known of the demo now. Filled by `run.py`, shown by `display.py` and `plain.py`."""

from __future__ import annotations

import json
import re
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from any_agent.demo.driver import Measures


@dataclass(frozen=True, slots=True)
class PartState:
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
    wait: float
    train: float

    @classmethod
    def of(cls, line: dict[str, Any]) -> Self:
        return cls(
            number=int(line["step"]),
            reward=float(line["reward"]),
            version=int(line["version"]),
            staleness=float(line["staleness_mean"]),
            wait=float(line["seconds"]["wait"]),
            train=float(line["seconds"]["train"]),
        )


@dataclass(frozen=True, slots=True)
class DemoState:
    """Everything that is shown, at one moment."""

    seed: int
    ranks: int
    steps: int
    folder: str
    phase: str = "making a tiny model"
    elapsed: float = 0.0
    """Seconds."""
    url: str = ""
    parts: tuple[PartState, ...] = ()
    history: tuple[Step, ...] = ()
    """In the order of the steps; one that a restarted trainer made again counts once."""
    sessions: Mapping[str, int] = field(default_factory=dict)
    """Train sessions by state; none while nothing is known."""
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

    def plus(self, steps: Sequence[Step]) -> DemoState:
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
        steps = []
        for line in lines:
            # What a trainer that died left of one is no line.
            with suppress(json.JSONDecodeError):
                steps.append(Step.of(json.loads(line)))
        return steps


_SAMPLE = re.compile(r"^any_agent_sessions\{([^}]*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class SessionTotals:
    """Train sessions by state, as the service's `/metrics` tell it."""

    def __init__(self) -> None:
        self._of_rank: dict[str, Counter[str]] = {}

    def read(self, metrics: str) -> dict[str, int]:
        """Their number over all ranks; a rank that is away counts with its last numbers."""
        now: dict[str, Counter[str]] = {}
        for labels, value in _SAMPLE.findall(metrics):
            label = dict(_LABEL.findall(labels))
            if label["mode"] == "train":
                now.setdefault(label["rank"], Counter())[label["state"]] += int(float(value))
        self._of_rank |= now
        return dict(sum(self._of_rank.values(), Counter()))


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
