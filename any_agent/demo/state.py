"""The state of a demo: its parts, its steps, and counts of its sessions."""

from __future__ import annotations

import re
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from any_agent.demo.task import TaskTurn, score


@dataclass(frozen=True, slots=True)
class Measures:
    """Averages over a phase's sessions."""

    accuracy: float
    """Share of sessions whose first answer was right."""
    reward: float
    """Score of a session as the trainer computes it: the mean of its turns' returns."""
    turns: float
    """Turns per session."""
    tokens: float
    """Sampled tokens per answer."""


@dataclass(slots=True)
class Tally:
    """Counts of a phase's sessions so far."""

    sessions: int = 0
    first_correct: int = 0
    reward: float = 0.0
    turns: int = 0
    tokens: int = 0
    """Sampled tokens, as the completions' usage counts them."""
    failed: int = 0
    errors: list[str] = field(default_factory=list)
    """The last five errors."""

    def add(self, turns: Sequence[TaskTurn], right: Sequence[bool]) -> None:
        self.sessions += 1
        self.first_correct += right[0]
        self.reward += score(right)
        self.turns += len(turns)
        self.tokens += sum(turn.tokens for turn in turns)

    def add_failure(self, error: str) -> None:
        self.failed += 1
        self.errors = [*self.errors[-4:], error]

    def measures(self) -> Measures:
        sessions = max(1, self.sessions)
        return Measures(
            accuracy=self.first_correct / sessions,
            reward=self.reward / sessions,
            turns=self.turns / sessions,
            tokens=self.tokens / max(1, self.turns),
        )


@dataclass(frozen=True, slots=True)
class PartState:
    """One process of the service, as the launcher sees it."""

    name: str
    state: str = "waiting"
    restarts: int = 0


Step: TypeAlias = dict[str, Any]
"""A step's line of `metrics.jsonl`."""


@dataclass(frozen=True, slots=True)
class DemoState:
    """Everything that the display shows, at one moment."""

    seed: int
    steps: int
    folder: str
    phase: str = "making a tiny model"
    elapsed: float = 0.0
    """Seconds since the start."""
    url: str = ""
    parts: tuple[PartState, ...] = ()
    history: tuple[Step, ...] = ()
    """The steps in their order; a step that a restarted trainer repeated counts once."""
    sessions: Mapping[str, int] = field(default_factory=dict)
    """Number of train sessions by state; empty until the service has answered."""
    tokens_per_second: float = 0.0
    prompts: int = 0
    """Number of sessions of one evaluation."""
    asked: int = 0
    """Number of finished sessions of the running evaluation."""
    before: Measures | None = None
    after: Measures | None = None

    @property
    def step(self) -> int:
        return self.history[-1]["step"] if self.history else 0

    @property
    def rewards(self) -> list[float]:
        return [step["reward"] for step in self.history]

    def plus(self, steps: Sequence[Step]) -> DemoState:
        """Return the state with more steps; the newest line of a step counts."""
        return replace(self, history=by_number([*self.history, *steps]))


def by_number(steps: Iterable[Step]) -> tuple[Step, ...]:
    """Return the steps in order, each once: the last line of a repeated step counts."""
    known = {step["step"]: step for step in steps}
    return tuple(known[number] for number in sorted(known))


_SAMPLE = re.compile(r"^any_agent_sessions\{([^}]*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class SessionTotals:
    """Train sessions by state, from the service's `/metrics`."""

    def __init__(self) -> None:
        self._by_rank: dict[str, Counter[str]] = {}

    def read(self, metrics: str) -> dict[str, int]:
        """Return the sums over all ranks; a rank that is missing counts with its last numbers."""
        now: dict[str, Counter[str]] = {}
        for labels, value in _SAMPLE.findall(metrics):
            label = dict(_LABEL.findall(labels))
            if label["mode"] == "train":
                now.setdefault(label["rank"], Counter())[label["state"]] += int(float(value))
        self._by_rank |= now
        return dict(sum(self._by_rank.values(), Counter()))


class Rate:
    """Growth of a count per second, over the last ``seconds`` or since the first count."""

    def __init__(self, seconds: float = 5.0) -> None:
        self._seconds = seconds
        self._counts: deque[tuple[float, float]] = deque()

    def add(self, count: float, now: float | None = None) -> float:
        """Record the count and return its growth per second. ``now``: monotonic seconds."""
        at = time.monotonic() if now is None else now
        self._counts.append((at, count))
        while len(self._counts) > 2 and self._counts[1][0] <= at - self._seconds:
            self._counts.popleft()
        began, first = self._counts[0]
        return (count - first) / (at - began) if at > began else 0.0
