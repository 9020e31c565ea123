"""What became of each run of an agent, and of all of them together."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Self, TypeAlias

RunState: TypeAlias = Literal["finalized", "awaiting_reward", "evaluated", "failed"]
_STATES = ("finalized", "awaiting_reward", "evaluated", "failed")


@dataclass(frozen=True, slots=True)
class RunResult:
    """One run of the agent on one item: one session, or, after failures, its last one."""

    item: int
    """The item's index in the dataset, from 0."""
    epoch: int
    """Which pass over the dataset, from 0."""
    member: int
    """Which of the item's runs, from 0 to the group's size."""
    state: RunState
    """How its session ended: `finalized` (train), `evaluated` (eval), `awaiting_reward` where the
    agent left its reward to others, or `failed`: then ``error`` and ``code`` say why."""
    reward: float | None = None
    """The session's final reward plus that of its last rewarded completion; None without any."""
    session_id: str | None = None
    task_id: str | None = None
    group_id: str | None = None
    attempts: int = 1
    """Sessions that were opened for it."""
    seconds: float = 0.0
    """The last attempt took, from its opened session to its end."""
    error: str | None = None
    code: str | None = None
    """The error's kind: `agent_failed`, `agent_timeout`, `invalid_reward`, `no_model_call`, ..."""
    version: int | None = None
    """The newest weight version that it sampled from."""

    @property
    def ok(self) -> bool:
        return self.state != "failed"

    @property
    def place(self) -> tuple[int, int, int]:
        """Epoch, item and member: what there is one result of."""
        return self.epoch, self.item, self.member

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON; what is None is left out."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def of(cls, data: dict[str, Any]) -> Self:
        """The inverse of :meth:`as_dict`; ValueError for anything else."""
        known = {field.name for field in fields(cls)}
        try:
            found = cls(**{name: value for name, value in data.items() if name in known})
        except TypeError as error:
            raise ValueError(str(error)) from None
        if found.state not in _STATES or not all(isinstance(n, int) for n in found.place):
            raise ValueError(f"no result has the state {found.state!r}")
        return found


@dataclass(frozen=True, slots=True)
class Summary:
    """Counts and means of a run's results."""

    runs: int
    """Of them, each one (epoch, item, member)."""
    ok: int
    failed: int
    mean: float | None
    """Of the rewards that there are."""
    reasons: dict[str, int]
    """How many failed with which code."""
    stopped: str | None
    """Why the runner ended before all runs were made."""

    def __str__(self) -> str:
        text = f"{self.runs} runs: {self.ok} ok"
        if self.failed:
            why = ", ".join(f"{count} {code}" for code, count in self.reasons.items())
            text += f", {self.failed} failed ({why})"
        if self.mean is not None:
            text += f"; mean reward {self.mean:.4g}"
        return f"{text}; stopped: {self.stopped}" if self.stopped else text


class RunResults(list[RunResult]):
    """The results of a run in the order of epochs, items and members.

    ``stopped`` says why the runner ended early (training has finished, say); None: it is complete.
    ``run`` is the run's name, which its groups' ids begin with.
    """

    def __init__(
        self, results: Iterable[RunResult] = (), *, run: str = "", stopped: str | None = None
    ) -> None:
        super().__init__(sorted(results, key=lambda result: result.place))
        self.run = run
        self.stopped = stopped

    @property
    def failed(self) -> list[RunResult]:
        return [result for result in self if not result.ok]

    @property
    def rewards(self) -> list[float]:
        """Those of the runs that have one, in their order."""
        return [result.reward for result in self if result.reward is not None]

    @property
    def mean(self) -> float | None:
        """The mean of :attr:`rewards`; None without any."""
        rewards = self.rewards
        return math.fsum(rewards) / len(rewards) if rewards else None

    def of_item(self, item: int, epoch: int = 0) -> list[RunResult]:
        """An item's runs."""
        return [result for result in self if (result.item, result.epoch) == (item, epoch)]

    def summary(self) -> Summary:
        failed = self.failed
        reasons = Counter(result.code or "failed" for result in failed)
        return Summary(
            runs=len(self),
            ok=len(self) - len(failed),
            failed=len(failed),
            mean=self.mean,
            reasons=dict(reasons.most_common()),
            stopped=self.stopped,
        )
