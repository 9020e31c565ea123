"""`evaluate` runs an agent on a dataset; `Evaluation` has its mean reward and pass@k."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal

from any_agent.rewards.score_statistics import Estimate, estimate, pass_at_k
from any_agent.sdk.find_service import ServiceAddress
from any_agent.sdk.open_session import find_run
from any_agent.sdk.results import RunResults
from any_agent.sdk.runner import AgentRunner

_CHECK_INTERVAL = 0.1


class Evaluation:
    """Scores of the items, and the figures that follow from them.

    Failed runs have no score: they are counted by their reason and left out of all means, unless
    they have the score ``failed_score``.
    """

    def __init__(
        self,
        results: RunResults,
        *,
        runs: int,
        threshold: float = 1.0,
        failed_score: float | None = None,
        model: str = "",
    ) -> None:
        """Evaluate a runner's results; runs that await a reward count as failed: `no_reward`."""
        self.runs = runs
        """The number of runs of each item."""
        self.threshold = threshold
        """The least reward that passes."""
        self.failed_score = failed_score
        self.model = model
        """The model as `experiment/trial`, from the service."""
        self.scores: dict[int, list[float]] = {}
        """The rewards of each item's runs, in the order of the dataset; empty if all its runs
        failed."""
        self.tasks: dict[int, str] = {}
        """The task ids of the items that have one."""
        self.failed: Counter[str] = Counter()
        """Failed runs by the code of their error."""
        for result in results:
            of_item = self.scores.setdefault(result.item, [])
            score = result.reward if result.ok else None
            if score is None:
                self.failed["no_reward" if result.ok else result.code or "failed"] += 1
                score = failed_score
            if score is not None:
                of_item.append(score)
            if result.task_id is not None and not result.task_id.startswith(f"{results.run}-"):
                self.tasks[result.item] = result.task_id
        self.versions = sorted({one.version for one in results if one.version is not None})
        """The weight versions that were sampled from: a single one for a pinned evaluation."""

    @property
    def reward(self) -> Estimate | None:
        """The mean over the items of the mean over an item's runs."""
        return estimate([sum(scores) / len(scores) for scores in self.scores.values() if scores])

    def pass_at(self, k: int) -> Estimate | None:
        """Estimate pass@k over the items that have at least k scores; None without any."""
        return estimate(
            [
                pass_at_k(len(scores), sum(score >= self.threshold for score in scores), k)
                for scores in self.scores.values()
                if len(scores) >= k
            ]
        )

    def default_ks(self) -> list[int]:
        """Return 1, 2, 4, ... and the number of runs."""
        ks = [1]
        while ks[-1] * 2 < self.runs:
            ks.append(ks[-1] * 2)
        return ks if ks[-1] == self.runs else [*ks, self.runs]

    def figures(self, ks: Sequence[int]) -> dict[str, Any]:
        """Return the figures as JSON."""
        return {
            "items": len(self.scores),
            "runs": self.runs,
            "failed": dict(self.failed),
            "failed_score": self.failed_score,
            "versions": self.versions,
            "threshold": self.threshold,
            "reward": _as_json(self.reward),
            "pass_at": {str(k): _as_json(self.pass_at(k)) for k in ks},
            "by_item": [
                {"item": item, "task_id": self.tasks.get(item), "rewards": scores}
                for item, scores in self.scores.items()
            ],
        }

    def table(self, ks: Sequence[int]) -> list[str]:
        """Return the figures as lines of a table."""
        rows = [("reward", self.reward), *((f"pass@{k}", self.pass_at(k)) for k in ks)]
        width = max(len(name) for name, _ in rows)
        lines = [f"{'':{width}}     mean      95 % interval  items"]
        return lines + [f"{name:{width}}  {_row(found)}" for name, found in rows]

    def describe_versions(self) -> str:
        """Describe which weights answered."""
        if not self.versions:
            return "version unknown, as no run has ended well"
        first, last = self.versions[0], self.versions[-1]
        return f"version {first}" if first == last else f"versions {first} to {last}"

    def describe_failures(self) -> str:
        """Describe how many runs failed, and why; empty if none did."""
        if not self.failed:
            return ""
        reasons = ", ".join(f"{count} {code}" for code, count in self.failed.most_common())
        treatment = "left out" if self.failed_score is None else f"count as {self.failed_score:g}"
        return f"{self.failed.total()} runs failed ({reasons}): {treatment}"


def _as_json(found: Estimate | None) -> dict[str, Any] | None:
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


async def evaluate(
    service: ServiceAddress,
    agent: Callable[..., Any],
    items: Sequence[Any],
    *,
    runs: int,
    version: int | Literal["current", "any"],
    threshold: float,
    failed_score: float | None,
    check: Callable[[], object] | None = None,
    **settings: Any,
) -> Evaluation:
    """Run the agent ``runs`` times on each item and return the scores.

    ``version`` is the weight version of all tokens: a number, the version that is served at the
    beginning, or any. ``check`` is called ten times a second meanwhile; an error of it ends the
    evaluation. ``settings`` are further arguments of :class:`AgentRunner`.

    Raises as :meth:`AgentRunner.arun`, and VersionGone where the service no longer serves the
    pinned weight version.
    """

    async def run() -> Evaluation:
        served = await find_run(service)
        pinned = {"current": served.version, "any": None}.get(str(version), version)
        assert pinned is None or isinstance(pinned, int)
        runner = AgentRunner(
            url=service.named,
            api_key=service.api_key,
            mode="eval",
            version=pinned,
            group_size=runs,
            # Where failures have a score, an agent that always fails is judged like any other.
            max_failures=32 if failed_score is None else sys.maxsize,
            **settings,
        )
        return Evaluation(
            await runner.arun(agent, items),
            runs=runs,
            threshold=threshold,
            failed_score=failed_score,
            model=f"{served.experiment}/{served.trial}",
        )

    work = asyncio.ensure_future(run())
    try:
        while check and not (await asyncio.wait([work], timeout=_CHECK_INTERVAL))[0]:
            check()
        return await work
    finally:
        work.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await work
