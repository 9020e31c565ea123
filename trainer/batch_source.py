"""Sources of the loop's batches: sessions of external agents, or of a workflow on a dataset."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from any_agent.config import Config
from any_agent.data import DatasetCursor, RowSource, as_dataset
from any_agent.errors import TrainingError
from any_agent.rollout import LeaseExecutor, WorkflowExecutor
from any_agent.types import SampledSession
from any_agent.workflow import GroupedRolloutWorkflow, RolloutWorkflow
from any_agent.workflow.tensors import padded
from trainer.batch import Group, ZeroVarianceGroups
from trainer.from_config import require_warm_up
from trainer.manifests import Manifest

GROUP = "data-"  # the prefix of a sampled group's id; its item's position follows


def position_of(session_id: str) -> int:
    """Return the position of a sampled session's item: its id is the group's and a number."""
    return int(session_id.removeprefix(GROUP).rpartition("-")[0])


class BatchSource:
    """A source of batches over an executor; the loop's thread calls all but :meth:`interrupt`."""

    executor: LeaseExecutor | WorkflowExecutor
    zero_variance: ZeroVarianceGroups
    """The groups that were left out because they teach nothing."""

    @property
    def epoch(self) -> float | None:
        """Finished passes over the dataset; None without one."""
        return None

    @property
    def resting(self) -> int | None:
        """The number of the dataset's items that rest in this pass; None without one."""
        return None

    def last_step(self, steps: int) -> int | None:
        """Return the latest step at which the dataset's epochs end, after so many; None: never."""
        return None

    def begin(self, version: int) -> None:
        """Let sessions begin; the engines serve this weight version."""
        raise NotImplementedError

    @property
    def admits(self) -> bool:
        """True once sessions may begin, after :meth:`begin`."""
        return True

    def stop(self) -> None:
        """End the sessions that run, if any."""

    def next_batch(self, timeout: float) -> list[Group]:
        """Return the next groups, the oldest ones first; [] if there will be no more.

        Raises TimeoutError, whose message describes the batch so far, and InterruptedError once
        :meth:`interrupt` was called.
        """
        raise NotImplementedError

    def interrupt(self) -> None:
        """End this and any later wait for a batch; safe in a signal handler."""
        self.executor.interrupt()

    def updating(self, version: int) -> AbstractContextManager[object]:
        """Return a context that is open while the engines' weights change to this version."""
        return nullcontext()

    def positions_of(self, groups: Sequence[Group]) -> list[int]:
        """Return the dataset's positions that are finished once a step has taken these groups."""
        return []

    def settle(self, taken: Manifest, step: int | None) -> None:
        """Record that a step, or no step, took these sessions."""
        raise NotImplementedError

    def state(self) -> Mapping[str, Any] | None:
        """Return the source's part of a checkpoint, as JSON; None for no part."""
        raise NotImplementedError

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a checkpoint's :meth:`state`."""
        raise NotImplementedError


class LeasedBatches(BatchSource):
    """Sessions of external agents, leased from the ranks. The loop owns the executor."""

    def __init__(self, executor: LeaseExecutor, zero_variance: ZeroVarianceGroups) -> None:
        """``zero_variance`` judges the executor's groups."""
        self.executor: LeaseExecutor = executor
        self.zero_variance = zero_variance
        self._dataset: Mapping[str, Any] | None = None
        """The state of a dataset that the trial was trained on before, and may be again."""

    def begin(self, version: int) -> None:
        self.executor.begin()

    @property
    def admits(self) -> bool:
        return self.executor.admits

    def next_batch(self, timeout: float) -> list[Group]:
        return list(self.executor.prepare_batch(timeout=timeout))

    def settle(self, taken: Manifest, step: int | None) -> None:
        """Record the items that a repeated step on the dataset has finished."""
        if taken.positions:
            before = self._dataset or {}
            beyond = sorted({*before.get("beyond", ()), *taken.positions})
            self._dataset = {**before, "beyond": beyond}

    def state(self) -> Mapping[str, Any] | None:
        return self._dataset

    def load(self, state: Mapping[str, Any] | None) -> None:
        self._dataset = state


class DatasetBatches(BatchSource):
    """A source of sessions that a workflow samples, in an order that survives stops.

    Each position of the dataset is finished once: by the step that took its group, or because it
    gave nothing to train on. Runs under way when the trainer ended are repeated.
    """

    def __init__(
        self,
        config: Config,
        dataset: RowSource,
        workflow: RolloutWorkflow,
        accept: Callable[[Any], bool] | None,
        executor: WorkflowExecutor,
    ) -> None:
        """``accept`` judges an item's trajectories, as one batch of tensors. ``executor`` runs the
        workflow; it is started and stopped here."""
        self._config = config
        self._dataset = as_dataset(dataset, "train_dataset")
        self._workflow = workflow
        self._accept = accept
        self.zero_variance = ZeroVarianceGroups(config.train)
        self.executor: WorkflowExecutor = executor
        self.started = False
        self._positions = DatasetCursor(
            len(self._dataset),
            seed=config.train.seed,
            shuffle=config.train_dataset.shuffle,
            epochs=config.train.epochs,
        )
        self._left_out: set[int] = set()
        """Finished positions that no manifest has yet."""
        self._lock = threading.Lock()
        if (last := self.last_step(0)) is not None:
            require_warm_up(config.train, last)

    @property
    def epoch(self) -> float | None:
        return round(self._positions.epoch, 4)

    @property
    def resting(self) -> int | None:
        return self._positions.resting

    def last_step(self, steps: int) -> int | None:
        """Return it by the items that remain: those that are left out later make it earlier."""
        if (end := self._positions.end) is None:
            return None
        runs, workflow = self._config.sessions.group_size, self._workflow
        if isinstance(workflow, GroupedRolloutWorkflow):
            runs *= workflow.group_size
        items = -(-self._config.rollout.batch_size // runs)
        # The latter is later if the steps so far had fewer items.
        return max(-(-end // items), steps - (self._positions.done - end) // items)

    def begin(self, version: int) -> None:
        self.executor.start()
        self.started = True
        self.executor.release(version)

    def stop(self) -> None:
        self.executor.stop()

    def next_batch(self, timeout: float) -> list[Group]:
        return list(
            self.executor.sessions_batch(
                self._items(),
                self._workflow,
                group_size=self._config.sessions.group_size,
                reject=self._reject,
                on_rejected=self._gave_nothing,
                timeout=timeout,
            )
        )

    @contextmanager
    def updating(self, version: int) -> Iterator[None]:
        """Let workflows' calls to the engines wait while the weights change to ``version``."""
        if not self.started:
            yield
            return
        self.executor.hold(version)
        try:
            yield
        except BaseException:
            # Each engine reports which weights it has.
            self.executor.release(None)
            raise
        self.executor.release(version)

    def positions_of(self, groups: Sequence[Group]) -> list[int]:
        with self._lock:
            taken = {int(group[0].group_id.removeprefix(GROUP)) for group in groups}
            return sorted(taken | self._left_out)

    def settle(self, taken: Manifest, step: int | None) -> None:
        if step is None:
            # No manifest says that they are finished: the next one will.
            self._leave_out(taken.positions)
        else:
            with self._lock:
                self._left_out.difference_update(taken.positions)
            self._positions.consumed(taken.positions)
            # A repeated step may have had sessions of external agents.
            taught = {position_of(id) for id in taken.sessions if id.startswith(GROUP)}
            self._judge(taught, dull=False)
            # Those of a repeated step were judged by an earlier trainer.
            self._judge(set(taken.positions) - taught, dull=True)
        if self.started and (step is None or step < self._config.train.steps):
            # Before the start a step was repeated, which occupies no place; after the last one
            # there is no use for further runs.
            self.executor.settled([f"{GROUP}{position}" for position in taken.positions])

    def state(self) -> Mapping[str, Any]:
        return self._positions.state()

    def load(self, state: Mapping[str, Any] | None) -> None:
        if state is not None:
            self._positions.load(dict(state))

    def _items(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for position, index in self._positions:
            yield position, self._dataset[index]

    def _reject(self, group: list[SampledSession]) -> str | None:
        rows = [row for session in group for row in session.rows]
        sessions = self._config.sessions
        reason = None
        if self._accept is not None and not self._accept(padded(rows)):
            reason = "not_accepted"
        elif len(group) < min(sessions.min_group_size, sessions.group_size):
            reason = "group_too_small"
        if reason is not None:
            self.zero_variance.refuse(group, reason)
        else:
            reason = self.zero_variance.reject_reason(group)
        self._require_signal()
        return reason

    def _require_signal(self) -> None:
        """Raise TrainingError after too many items without a signal: it would never end."""
        if self.zero_variance.consecutive >= self._config.rollout.max_dull_groups:
            raise TrainingError(
                f"{self.zero_variance}. If that is the lowest possible score, the items are too "
                "hard or the reward function never finds what it looks for; if it is the highest, "
                "they are learned. rollout.max_dull_groups sets how many such groups are allowed"
            )

    def _gave_nothing(self, position: int, reason: str) -> None:
        self._judge([position], dull=True)
        self._leave_out([position])

    def _leave_out(self, positions: Sequence[int]) -> None:
        with self._lock:
            self._left_out.update(positions)
        self._positions.consumed(positions)

    def _judge(self, positions: Iterable[int], *, dull: bool) -> None:
        """Let items that taught nothing rest, where they may."""
        if self._config.rollout.sampling == "learnable":
            for position in positions:
                self._positions.judged(position, dull=dull)
