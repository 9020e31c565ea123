"""The report of a run: its console, `metrics.jsonl`, `/metrics`, trackers, and its waits."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from any_agent.config import Config
from any_agent.rundir.layout import RunDir
from any_agent.runtime.atomic_files import append_line, write_atomic
from any_agent.runtime.disk_space import DiskSpace
from trainer.batch import TrainingBatch, ZeroVarianceGroups
from trainer.batch_source import BatchSource
from trainer.metrics import TrainerMetrics, last_reported, step_line
from trainer.policy import Policy, StepResult
from trainer.trackers import Trackers

log = logging.getLogger(__name__)


class RunReport:
    """Tells people and programs how the training goes. ``say`` gets the lines for the console."""

    def __init__(
        self,
        config: Config,
        run_dir: RunDir,
        disk: DiskSpace,
        rejected_early: Callable[[], Mapping[str, int]],
        since_step: Callable[[], Mapping[str, Any]],
        say: Callable[[str], None],
    ) -> None:
        self.say = say
        self.reported = 0
        """The last step with a line in `metrics.jsonl` at the start."""
        self._dir = run_dir
        self._disk = disk
        self._trackers = Trackers(config, run_dir)
        self.metrics = TrainerMetrics(
            rejected_early, disk, lambda: self._trackers.failures, since_step
        )

    def load(self) -> None:
        """Read which steps earlier starts of the trial have reported, and forget their waits."""
        self.reported = last_reported(self._dir.metrics)
        with suppress(OSError):
            self._dir.waiting.unlink(missing_ok=True)

    @contextmanager
    def tracking(self, hurry: Callable[[], bool]) -> Iterator[None]:
        """Let the trackers follow; at the end they may send what is left, less in a ``hurry``."""
        self._trackers.start()
        try:
            yield
        finally:
            self._trackers.close(hurry())

    def announce(self, *lines: str) -> None:
        for line in lines:
            self.say(line)
        # Another process that watches the run reads it. A failed write does not end training.
        with suppress(OSError):
            write_atomic(self._dir.waiting, "\n".join(lines) + "\n")

    def waiting(
        self, error: TimeoutError, zero_variance: ZeroVarianceGroups, *, early: bool = False
    ) -> None:
        """Announce what the trainer waits for, and why it may be that long.

        An ``early`` wait is usual, and no alarm: those begin with the word `waiting`.
        """
        lines = [f"{'trainer   waits' if early else 'waiting  '} for trajectories: {error}"]
        notices = (zero_variance.notice, *zero_variance.trainability.notices)
        lines += [f"waiting   {notice}" for notice in notices if notice is not None]
        self.announce(*lines)

    def step(
        self,
        policy: Policy,
        version: int,
        batch: TrainingBatch,
        result: StepResult,
        source: BatchSource,
    ) -> None:
        """Report a finished step, durably."""
        line = step_line(policy.steps, version, batch, result, source, policy.clock.take())
        self._disk.write(
            lambda: append_line(self._dir.metrics, json.dumps(line)),
            self._dir.path,
            "a metric's line",
        )
        self.metrics.record_step(line)
        self._trackers.wake()
        for notice in self._trackers.take_notices():
            self.announce(f"tracking  {notice}")
        text = "step {step}: reward {reward:.3f}, {sessions} sessions, {tokens} tokens, staleness "
        log.info("%s", (text + "{staleness_mean:.2f}, version {version}").format_map(line))
        policy.clock.lap("report")

    def evaluation(self, line: Mapping[str, Any]) -> None:
        """Report an evaluation, whose line is written."""
        self.metrics.record_evaluation(line)
        self._trackers.wake()
