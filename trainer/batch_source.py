"""Sources of the loop's batches: the interface, and the sessions of external agents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from any_agent.protocol.rl import Capacity
from any_agent.rollout import LeaseExecutor, WorkflowExecutor
from trainer.batch import Group
from trainer.manifests import Manifest


class BatchSource:
    """A source of batches over an executor; the loop's thread calls all but :meth:`interrupt`."""

    def __init__(self, executor: LeaseExecutor | WorkflowExecutor) -> None:
        self.executor: Any = executor

    @property
    def rejected(self) -> Mapping[str, int]:
        """The numbers of sessions that were rejected before they came into a batch, by reason."""
        found: Mapping[str, int] = self.executor.rejected
        return found

    @property
    def capacity(self) -> Capacity | None:
        """The numbers of sessions that run and that may run, if they are known."""
        found: Capacity | None = self.executor.capacity
        return found

    @property
    def epoch(self) -> float | None:
        """Finished passes over the dataset; None without one."""
        return None

    def begin(self, version: int) -> None:
        """Let sessions begin; the engines serve this weight version."""
        raise NotImplementedError

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

    def __init__(self, executor: LeaseExecutor) -> None:
        super().__init__(executor)
        self._dataset: Mapping[str, Any] | None = None
        """The state of a dataset that the trial was trained on before, and may be again."""

    def begin(self, version: int) -> None:
        self.executor.begin()

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
