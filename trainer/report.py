"""The report of a run: its console, `metrics.jsonl`, `/metrics`, trackers, and its waits."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from any_agent import stats_tracker
from any_agent.config import Config
from any_agent.rundir.layout import RunDir
from any_agent.runtime.atomic_files import append_line, write_atomic
from any_agent.runtime.disk_space import DiskSpace
from any_agent.runtime.log_tail import records_in
from trainer.batch import TrainingBatch
from trainer.batch_source import BatchSource
from trainer.metrics import PHASES, TrainerMetrics
from trainer.policy import Policy, StepResult
from trainer.trackers import Trackers

log = logging.getLogger(__name__)

_MAX_NAMES = 16  # named rewards in a step's line


class RunReport:
    """Tells people and programs how the training goes. ``say`` gets the lines for the console."""

    def __init__(
        self,
        config: Config,
        run_dir: RunDir,
        disk: DiskSpace,
        source: Callable[[], BatchSource],
        say: Callable[[str], None],
    ) -> None:
        self.say = say
        self.reported = 0
        """The last step with a line in `metrics.jsonl` at the start."""
        self._dir = run_dir
        self._disk = disk
        self.trackers = Trackers(config, run_dir)
        self._source = source
        self.metrics = TrainerMetrics(
            lambda: source().executor.rejected,
            disk,
            lambda: self.trackers.failures,
            lambda: source().zero_variance.scores.read(),
        )

    def load(self) -> None:
        """Read which steps earlier starts of the trial have reported, and forget their waits."""
        lines = reversed(records_in(self._dir.metrics))
        self.reported = next((int(line["step"]) for line in lines if "step" in line), 0)
        with suppress(OSError):
            self._dir.waiting.unlink(missing_ok=True)

    def announce(self, *lines: str) -> None:
        for line in lines:
            self.say(line)
        # Another process that watches the run reads it. A failed write does not end training.
        with suppress(OSError):
            write_atomic(self._dir.waiting, "\n".join(lines) + "\n")

    def waiting(self, error: TimeoutError, *, early: bool) -> None:
        """Announce what the trainer waits for, and why it may be that long.

        An ``early`` wait is usual, and no alarm: those begin with the word `waiting`.
        """
        lines = [f"{'trainer   waits' if early else 'waiting  '} for trajectories: {error}"]
        groups = self._source().zero_variance
        notices = (groups.notice, *groups.trainability.notices)
        lines += [f"waiting   {notice}" for notice in notices if notice is not None]
        self.announce(*lines)

    def step(self, policy: Policy, version: int, batch: TrainingBatch, result: StepResult) -> None:
        """Report a finished step, durably."""
        line = self._line(policy, version, batch, result)
        self._write(line)
        self.metrics.record_step(line)
        self.trackers.wake()
        for notice in self.trackers.take_notices():
            self.announce(f"tracking  {notice}")
        text = "step {step}: reward {reward:.3f}, {sessions} sessions, {tokens} tokens, staleness "
        log.info("%s", (text + "{staleness_mean:.2f}, version {version}").format_map(line))
        policy.clock.lap("report")

    def evaluation(self, line: Mapping[str, Any]) -> None:
        """Report an evaluation, durably."""
        self._write(line)
        self.metrics.record_evaluation(line)
        self.trackers.wake()

    def evaluated(self) -> set[int]:
        """Return the steps whose evaluations are reported, also by earlier starts."""
        return {line["step"] for line in records_in(self._dir.metrics) if "eval" in line}

    def _write(self, line: Mapping[str, Any]) -> None:
        self._disk.write(
            lambda: append_line(self._dir.metrics, json.dumps(line)),
            self._dir.path,
            "a metric's line",
        )

    def _line(
        self, policy: Policy, version: int, batch: TrainingBatch, result: StepResult
    ) -> dict[str, Any]:
        """Return a step's line as plain data; it takes the statistics that workflows have recorded,
        and the scores of all sessions since the step before (`all`)."""
        source = self._source()
        now, every = source.executor.capacity, source.zero_variance.scores.read(take=True)
        seconds = policy.clock.take()
        return {
            "time": time.time(),
            "step": policy.steps,
            "version": version,
            "reward": sum(batch.scores) / max(1, len(batch.scores)),
            "all": every,
            "rewards": named_means(batch.named),
            "sessions": len(batch.trained),
            "left_out": dict(Counter(batch.rejected.values())),
            "rejected": dict(source.executor.rejected),
            "interactions": len(batch.rows),
            "staleness_mean": sum(batch.ages) / max(1, len(batch.ages)),
            "staleness_max": max(batch.ages, default=0),
            "staleness": {
                str(age): count / len(batch.ages)
                for age, count in sorted(Counter(batch.ages).items())
            },
            "lengths": {
                name: {"mean": sum(values) / max(1, len(values)), "max": max(values, default=0)}
                for name, values in batch.lengths.items()
            },
            "cut": sum(batch.cut) / len(batch.cut) if batch.cut else None,
            "truncated": batch.truncated,
            "lone_roles": batch.lone_roles,
            "grad_norm": result.grad_norm,
            "learning_rate": result.learning_rate,
            "updates": result.updates,
            **result.stats.means(),
            "seconds": {phase: round(seconds.get(phase, 0.0), 4) for phase in PHASES},
            "capacity": now.model_dump() if now else None,
            "epoch": source.epoch,
            "resting": source.resting,
            "stats": without_counts(stats_tracker.export_all()),
        }


def named_means(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the mean of each named reward, of the names that most sessions have: agents choose
    them, and each step keeps them."""
    common = sorted(values, key=lambda name: (-len(values[name]), name))[:_MAX_NAMES]
    return {name: sum(values[name]) / len(values[name]) for name in sorted(common)}


def without_counts(stats: Mapping[str, float]) -> dict[str, float]:
    """Return statistics without the numbers of values behind them."""
    return {name: value for name, value in stats.items() if not name.endswith("__count")}
