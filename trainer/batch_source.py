"""Where the loop's batches come from: external agents' sessions, or a workflow's on a dataset."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from any_agent.protocol.rl import Capacity
from any_agent.rollout import LeaseExecutor
from trainer.batch import Group
from trainer.manifests import Manifest

log = logging.getLogger(__name__)


class BatchSource(Protocol):
    """What the loop asks, all in its own thread but for :meth:`interrupt`."""

    @property
    def rejected(self) -> Mapping[str, int]:
        """Sessions that were left out before they came into a batch, by reason."""

    @property
    def capacity(self) -> Capacity | None:
        """How many run and how many wait, if that is known."""

    @property
    def epoch(self) -> float | None:
        """Passes over the dataset that are done with; None without one."""

    def begin(self, version: int) -> None:
        """Let sessions begin; the engines serve this weight version."""

    def stop(self) -> None:
        """End what runs; also where nothing began."""

    def next_batch(self, timeout: float) -> list[Group]:
        """The next groups, the oldest ones first; none where there are no more, ever.

        Raises TimeoutError, which says what is there so far, and InterruptedError once
        :meth:`interrupt` was called.
        """

    def interrupt(self) -> None:
        """End the wait for a batch, now and from now on; safe in a signal handler."""

    def updating(self, version: int) -> AbstractContextManager[object]:
        """Open while the engines' weights change to this version's."""

    def positions_of(self, groups: Sequence[Group]) -> list[int]:
        """The items of the dataset that are done with when a step has taken these groups."""

    def settle(self, taken: Manifest, step: int | None) -> None:
        """A step, or none, took this."""

    def state(self) -> Mapping[str, Any] | None:
        """What a checkpoint keeps of it, as JSON."""

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Go on from what :meth:`state` said, None for a checkpoint without."""


class LeasedBatches:
    """Sessions of external agents, leased from the ranks."""

    def __init__(self, executor: LeaseExecutor) -> None:
        self._executor = executor
        self._dataset: Mapping[str, Any] | None = None

    @property
    def rejected(self) -> Mapping[str, int]:
        return self._executor.rejected

    @property
    def capacity(self) -> Capacity | None:
        return self._executor.capacity

    @property
    def epoch(self) -> float | None:
        return None

    def begin(self, version: int) -> None:
        self._executor.begin()

    def stop(self) -> None:
        """The executor is the loop's."""

    def next_batch(self, timeout: float) -> list[Group]:
        return list(self._executor.prepare_batch(timeout=timeout))

    def interrupt(self) -> None:
        self._executor.interrupt()

    def updating(self, version: int) -> AbstractContextManager[object]:
        return nullcontext()

    def positions_of(self, groups: Sequence[Group]) -> list[int]:
        return []

    def settle(self, taken: Manifest, step: int | None) -> None:
        """The ranks are told by the loop."""
        if taken.positions:
            # A step on the dataset that was made again: its items are done with.
            before = self._dataset or {}
            beyond = sorted({*before.get("beyond", ()), *taken.positions})
            self._dataset = {**before, "beyond": beyond}

    def state(self) -> Mapping[str, Any] | None:
        """What the ranks hold is in their journals. A dataset that the trial was trained on before
        is gone on with some time, perhaps."""
        return self._dataset

    def load(self, state: Mapping[str, Any] | None) -> None:
        self._dataset = state
