"""Evaluation of the policy on the validation dataset, between two steps."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from any_agent import stats_tracker
from any_agent.config import EvalConfig
from any_agent.data import RowDataset
from any_agent.launcher.training_progress import format_evaluation
from any_agent.rewards.score_statistics import estimate
from any_agent.rollout.workflow_executor import WorkflowExecutor
from any_agent.workflow import WorkflowLike
from any_agent.workflow.base import TensorDict
from trainer.report import RunReport, without_counts

log = logging.getLogger(__name__)

_SCOPE = "eval-rollout"
_AHEAD = 1024  # items that are submitted to the executor before the first one's results are taken


def figures(scores: Sequence[Sequence[float]], failed: Counter[str]) -> dict[str, Any]:
    """Return an evaluation's figures as `metrics.jsonl` has them.

    ``scores`` are each item's, one for each run that has one; ``failed`` counts the other runs by
    reason. The reward is the mean over items of the mean over an item's runs, `best` that over
    items of their best run (with k runs and rewards of 0 and 1: pass@k). The 95 % confidence
    interval is Student's, of the mean over items, because the runs of one item are no independent
    draws. Without a score they are None, the interval also for a single item.
    """
    scored = [each for each in scores if each]
    found = estimate([float(np.mean(each)) for each in scored])
    return {
        "reward": found.mean if found is not None else None,
        "ci95": found.interval if found is not None else None,
        "best": float(np.mean([max(each) for each in scored])) if scored else None,
        "items": len(scored),
        "episodes": sum(map(len, scored)),
        "failed": dict(failed),
    }


@dataclass(eq=False)
class TrialEvaluation:
    """Runs a workflow on every item of a dataset when it is due, and reports the figures.

    ``executor`` returns the executor to run on. No run is trained on. Training waits meanwhile, so
    all runs have the same weights. A run that fails, or has not ended after ``eval.timeout``
    seconds, is counted by its reason and left out of the means.
    """

    config: EvalConfig
    dataset: RowDataset
    workflow: WorkflowLike
    executor: Callable[[], WorkflowExecutor]
    report: RunReport

    def __post_init__(self) -> None:
        self._done = self.report.evaluated()
        self._executor: WorkflowExecutor | None = None
        self._interrupted = False

    def __call__(self, step: int, last: bool) -> None:
        """Evaluate if an evaluation is due after ``step`` steps and was not made before a restart.

        Raises InterruptedError when training is interrupted.
        """
        if self._is_due(step, last) and step not in self._done:
            self._executor = self.executor()
            try:
                if self._interrupted:
                    raise InterruptedError("training was interrupted")
                self._evaluate(step, self._executor)
            finally:
                self._executor = None
            self._done.add(step)

    def interrupt(self) -> None:
        """End this and any later evaluation by InterruptedError; safe in a signal handler."""
        self._interrupted = True
        if self._executor is not None:
            self._executor.interrupt()

    def _is_due(self, step: int, last: bool) -> bool:
        c = self.config
        if step == 0:
            return c.at_start
        return c.every > 0 and (last or step % c.every == 0)

    def _evaluate(self, step: int, executor: WorkflowExecutor) -> None:
        started = time.monotonic()
        stats = stats_tracker.get(_SCOPE)
        stats.export(reset=True)
        found = self._run(executor, started + self.config.timeout)
        line = {
            "time": time.time(),
            "step": step,
            "version": executor.version,
            "eval": found
            | {
                "seconds": round(time.monotonic() - started, 3),
                "stats": without_counts(stats.export(reset=True)),
            },
        }
        self.report.evaluation(line)
        log.info("%s", format_evaluation(line))

    def _run(self, executor: WorkflowExecutor, deadline: float) -> dict[str, Any]:
        """Run all items, and return the :func:`figures`."""
        scores: list[list[float]] = []
        failed: Counter[str] = Counter()
        size = self.config.group_size
        waiting: deque[int] = deque()
        todo = iter(range(len(self.dataset)))
        try:
            while True:
                while len(waiting) < _AHEAD and (item := next(todo, None)) is not None:
                    waiting.append(
                        executor.submit(
                            self.dataset[item],
                            self.workflow,
                            group_size=size,
                            task_id=item,
                            is_eval=True,
                        )
                    )
                if not waiting:
                    return figures(scores, failed)
                left = max(0.0, deadline - time.monotonic())
                runs, lost = executor.wait_for_runs(waiting[0], left)
                waiting.popleft()
                scores.append([score(run) for run in runs])
                failed += lost
        except TimeoutError:
            missing = len(self.dataset) - len(scores)
            failed["timeout"] += missing * size
            log.warning(
                "the evaluation ended after eval.timeout=%g s without %d of its %d items",
                *(self.config.timeout, missing, len(self.dataset)),
            )
            return figures(scores, failed)
        finally:
            executor.drop(waiting)


def score(run: TensorDict) -> float:
    """Return a run's score: the mean reward of its rows with sampled tokens, as in training."""
    rewards = np.asarray(run["rewards"], dtype=np.float64).reshape(-1)
    counted = np.asarray(run["loss_mask"]).reshape(len(rewards), -1).any(axis=1)
    return float(rewards[counted].mean() if counted.any() else rewards.mean())
