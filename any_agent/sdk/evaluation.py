"""What runs of an agent on a dataset say of a model: mean reward and pass@k, in words, too."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from any_agent.rewards.score_statistics import Estimate, estimate, pass_at_k
from any_agent.sdk.results import RunResult, RunResults


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores of the items, and what follows from them.

    Runs that failed have no score: they are counted by their reason and left out of all means,
    unless ``failed_score`` says what they count as.
    """

    scores: dict[int, list[float]]
    """By item, in the order of the dataset: its runs' rewards. An item all of whose runs failed has
    none."""
    tasks: dict[int, str]
    """The items' own names for their tasks, of those that have one."""
    runs: int
    """Of each item, if none fails."""
    failed: Counter[str] = field(default_factory=Counter)
    """Runs by the kind of their error."""
    versions: tuple[int, ...] = ()
    """Of the weights that were sampled from; one, where the service was pinned to it."""
    failed_score: float | None = None
    threshold: float = 1.0
    """The least reward that passes."""

    @classmethod
    def of(
        cls,
        results: RunResults,
        *,
        runs: int,
        threshold: float = 1.0,
        failed_score: float | None = None,
    ) -> Self:
        """From a runner's results. A run whose reward was left to others counts as failed:
        `no_reward`."""
        scores: dict[int, list[float]] = defaultdict(list)
        tasks, failed, versions = {}, Counter[str](), set()
        for result in results:
            of_item = scores[result.item]
            score = result.reward if result.ok else None
            if score is None:
                failed[_why(result)] += 1
                score = failed_score
            if score is not None:
                of_item.append(score)
            if result.task_id is not None and not result.task_id.startswith(f"{results.run}-"):
                tasks[result.item] = result.task_id
            if result.version is not None:
                versions.add(result.version)
        return cls(
            dict(scores), tasks, runs, failed, tuple(sorted(versions)), failed_score, threshold
        )

    @property
    def reward(self) -> Estimate | None:
        """Over items, of the mean over an item's runs."""
        return estimate([sum(scores) / len(scores) for scores in self.scores.values() if scores])

    def pass_at(self, k: int) -> Estimate | None:
        """Over those items that have at least k scores; None without any."""
        found = estimate(
            [
                pass_at_k(len(scores), sum(score >= self.threshold for score in scores), k)
                for scores in self.scores.values()
                if len(scores) >= k
            ]
        )
        if found is None or found.interval is None:
            return found
        low, high = found.interval
        # No chance lies beyond these.
        return found._replace(interval=(max(low, 0.0), min(high, 1.0)))

    def default_ks(self) -> list[int]:
        """1, 2, 4, ... and the number of runs."""
        ks = [1]
        while ks[-1] * 2 < self.runs:
            ks.append(ks[-1] * 2)
        return ks if ks[-1] == self.runs else [*ks, self.runs]

    def figures(self, ks: Sequence[int]) -> dict[str, Any]:
        """As JSON."""
        return {
            "items": len(self.scores),
            "runs": self.runs,
            "failed": dict(self.failed),
            "failed_score": self.failed_score,
            "versions": list(self.versions),
            "threshold": self.threshold,
            "reward": _plain(self.reward),
            "pass_at": {str(k): _plain(self.pass_at(k)) for k in ks},
            "by_item": [
                {"item": item, "task_id": self.tasks.get(item), "rewards": scores}
                for item, scores in self.scores.items()
            ],
        }

    def table(self, ks: Sequence[int]) -> list[str]:
        """The same for people, a line each."""
        rows = [("reward", self.reward), *((f"pass@{k}", self.pass_at(k)) for k in ks)]
        width = max(len(name) for name, _ in rows)
        lines = [f"{'':{width}}     mean      95 % interval  items"]
        return lines + [f"{name:{width}}  {_row(found)}" for name, found in rows]

    def said_of_versions(self) -> str:
        """Which weights answered."""
        if not self.versions:
            return "version unknown, as nothing was sampled"
        first, last = self.versions[0], self.versions[-1]
        return f"version {first}" if first == last else f"versions {first} to {last}"

    def said_of_failed(self) -> str:
        """How many runs failed, and why; empty if none did."""
        if not self.failed:
            return ""
        why = ", ".join(f"{count} {code}" for code, count in self.failed.most_common())
        as_what = "left out" if self.failed_score is None else f"count as {self.failed_score:g}"
        return f"{self.failed.total()} runs failed ({why}): {as_what}"


def _why(result: RunResult) -> str:
    return "no_reward" if result.ok else result.code or "failed"


def _plain(found: Estimate | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {"mean": found.mean, "ci95": found.interval, "items": found.items}


def _row(found: Estimate | None) -> str:
    if found is None:
        return f"{'-':>7}  {'-':>17}  {0:5}"
    interval = f"{'-':>17}"
    if found.interval is not None:
        low, high = found.interval
        interval = f"{f'{low:.3f} .. {high:.3f}':>17}"
    return f"{found.mean:7.3f}  {interval}  {found.items:5}"
