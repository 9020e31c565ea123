"""What agents were told: the promises that a service is held to afterwards."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Answer:
    """An answered call; its times are seconds since the epoch."""

    text: str
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass(slots=True)
class Told:
    """What the agent of one session got a 2xx for; requests without an answer promise nothing."""

    session_id: str
    api_key: str
    mode: str
    answers: dict[str, Answer] = field(default_factory=dict)
    """By completion id; a stream counts once its last event came."""
    rewards: dict[str, float] = field(default_factory=dict)
    """By completion id."""
    finalized: bool = False

    @property
    def end_key(self) -> str:
        """The key for its rewards and its end: these agents reward themselves."""
        return self.api_key


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that failed for good from its agent's view, its SDK's own retries included."""

    at: float
    """Seconds since the epoch."""
    what: str
    """`open`, `call`, `reward` or `finalize`."""
    error: str


@dataclass(slots=True)
class Ledger:
    """The sessions of all agents, and what went wrong for them."""

    sessions: list[Told] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    """Answers that no failure excuses, e.g. a stream that ended as if it were complete."""

    def open(self, session_id: str, api_key: str, mode: str) -> Told:
        told = Told(session_id, api_key, mode)
        self.sessions.append(told)
        return told

    def fail(self, what: str, error: Exception) -> None:
        self.failures.append(Failure(time.time(), what, name_of(error)))

    def finalized(self) -> list[Told]:
        """Sessions whose end was acknowledged."""
        return [told for told in self.sessions if told.finalized]

    def answers(self) -> Iterator[tuple[Told, str, Answer]]:
        """Every answered call with its session and completion id."""
        for told in self.sessions:
            for completion_id, answer in told.answers.items():
                yield told, completion_id, answer

    def failed(self, what: str, begin: float = 0.0, end: float = float("inf")) -> Counter[str]:
        """Failures of a kind in a span of time, by error."""
        return Counter(f.error for f in self.failures if f.what == what and begin <= f.at < end)


def name_of(error: Exception) -> str:
    """An error's class, with the service's code and status where it has them."""
    parts = [type(error).__name__]
    for name in ("status_code", "code"):
        value = getattr(error, name, None)
        if value is not None:
            parts.append(str(value))
    return " ".join(parts)
