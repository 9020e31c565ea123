"""Evaluation: what the policy does on the validation dataset, between two steps."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from any_agent import stats_tracker
from any_agent.config import EvalConfig
from any_agent.data import RowDataset
from any_agent.launcher.training_progress import format_evaluation
from any_agent.rewards.score_statistics import Estimate, estimate
from any_agent.rollout.workflow_executor import WorkflowExecutor
from any_agent.runtime.atomic_files import append_line
from any_agent.workflow import WorkflowLike
from any_agent.workflow.base import TensorDict

log = logging.getLogger(__name__)

_SCOPE = "eval-rollout"
_AHEAD = 1024
"""Items that are handed to the executor before the results of the first of them are taken."""


@dataclass(slots=True)
class EvaluationFigures:
    """What an evaluation found."""

    scores: list[list[float]] = field(default_factory=list)
    """Of each item, those of its runs that have one."""
    failed: Counter[str] = field(default_factory=Counter)
    """Runs without a score, by reason."""

    @property
    def reward(self) -> float | None:
        """The mean over items of the mean over an item's runs; None if all runs failed."""
        found = self._estimate()
        return found.mean if found is not None else None

    @property
    def ci95(self) -> tuple[float, float] | None:
        """Where it lies with 95 % confidence, had the items been others of their kind.

        Student's interval of the mean over items, the runs of one being no independent draws; None
        for fewer than two items.
        """
        found = self._estimate()
        return found.interval if found is not None else None

    @property
    def best(self) -> float | None:
        """The mean over items of their best run; of a group of k and rewards 0 and 1: pass@k."""
        best = [max(scores) for scores in self.scores if scores]
        return float(np.mean(best)) if best else None

    def _estimate(self) -> Estimate | None:
        return estimate([float(np.mean(scores)) for scores in self.scores if scores])

    def line(self) -> dict[str, Any]:
        """As `metrics.jsonl` has it."""
        return {
            "reward": self.reward,
            "ci95": self.ci95,
            "best": self.best,
            "items": sum(1 for scores in self.scores if scores),
            "episodes": sum(map(len, self.scores)),
            "failed": dict(self.failed),
        }


class TrialEvaluation:
    """Runs a workflow on every item of a dataset when it is due, and tells what came of it.

    ``opened`` gives the executor that it runs on, for the time of an evaluation. Nothing of it is
    trained on; training waits meanwhile, so all of it has the same weights. A run that fails, or is
    not there after ``eval.timeout`` seconds, is counted by its reason and left out of the means.
    """

    def __init__(
        self,
        config: EvalConfig,
        dataset: RowDataset,
        workflow: WorkflowLike,
        kwargs: Mapping[str, Any] | None,
        opened: Callable[[], AbstractContextManager[WorkflowExecutor]],
        *,
        metrics: Path,
        reported: Callable[[dict[str, Any]], None],
    ) -> None:
        """``metrics``: the run's `metrics.jsonl`, which gets a line; ``reported`` is given it."""
        self._config = config
        self._dataset = dataset
        self._workflow = workflow
        self._kwargs = kwargs
        self._opened = opened
        self._metrics = metrics
        self._reported = reported
        self._done = evaluated_steps(metrics)
        self._executor: WorkflowExecutor | None = None
        self._interrupted = False

    def __call__(self, step: int, last: bool) -> None:
        """Evaluate, if it is due after so many steps, and was not done before a restart.

        Raises InterruptedError when training is interrupted.
        """
        if self._is_due(step, last) and step not in self._done:
            with self._opened() as self._executor:
                if self._interrupted:
                    raise InterruptedError("training was interrupted")
                try:
                    self._evaluate(step, self._executor)
                finally:
                    self._executor = None
            self._done.add(step)

    def interrupt(self) -> None:
        """End it by InterruptedError, now and from now on; safe in a signal handler."""
        self._interrupted = True
        if self._executor is not None:
            self._executor.interrupt()

    def _is_due(self, step: int, last: bool) -> bool:
        c = self._config
        if step == 0:
            return c.at_start
        return c.every > 0 and (last or step % c.every == 0)

    def _evaluate(self, step: int, executor: WorkflowExecutor) -> None:
        begun = time.monotonic()
        stats = stats_tracker.get(_SCOPE)
        stats.export(reset=True)
        figures = self._run(executor, begun + self._config.timeout)
        line = {
            "time": time.time(),
            "step": step,
            "version": executor.version,
            "eval": figures.line()
            | {
                "seconds": round(time.monotonic() - begun, 3),
                "stats": {
                    name: value
                    for name, value in stats.export(reset=True).items()
                    if not name.endswith("__count")
                },
            },
        }
        append_line(self._metrics, json.dumps(line))
        self._reported(line)
        log.info("%s", format_evaluation(line))

    def _run(self, executor: WorkflowExecutor, deadline: float) -> EvaluationFigures:
        figures, size = EvaluationFigures(), self._config.group_size
        waiting: deque[int] = deque()
        todo = iter(range(len(self._dataset)))
        try:
            while True:
                while len(waiting) < _AHEAD and (item := next(todo, None)) is not None:
                    waiting.append(
                        executor.submit(
                            self._dataset[item],
                            self._workflow,
                            self._kwargs,
                            group_size=size,
                            task_id=item,
                            is_eval=True,
                        )
                    )
                if not waiting:
                    return figures
                left = max(0.0, deadline - time.monotonic())
                runs, lost = executor.wait_for_runs(waiting[0], left)
                waiting.popleft()
                figures.scores.append([score(run) for run in runs])
                figures.failed += lost
        except TimeoutError:
            missing = len(self._dataset) - len(figures.scores)
            figures.failed["timeout"] += missing * size
            log.warning(
                "an evaluation was ended after eval.timeout=%g s, without %d of its %d items",
                *(self._config.timeout, missing, len(self._dataset)),
            )
            return figures
        finally:
            executor.drop(waiting)


def score(run: TensorDict) -> float:
    """One run's: the mean reward of its rows that have sampled tokens, as in training."""
    rewards = np.asarray(run["rewards"], dtype=np.float64).reshape(-1)
    counted = np.asarray(run["loss_mask"]).reshape(len(rewards), -1).any(axis=1)
    return float(rewards[counted].mean() if counted.any() else rewards.mean())


def evaluated_steps(path: Path) -> set[int]:
    """The steps that `metrics.jsonl` has an evaluation of; a line half-written is passed over."""
    steps = set()
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        if '"eval"' not in line:
            continue
        try:
            told = json.loads(line)
            if "eval" in told:
                steps.add(int(told["step"]))
        except (ValueError, KeyError, TypeError):
            continue
    return steps
