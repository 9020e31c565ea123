"""Batches of a workflow's runs on a dataset."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from any_agent.config import Config
from any_agent.data import Positions
from any_agent.errors import ConfigError
from any_agent.protocol import Capacity
from any_agent.rollout.workflow_executor import WorkflowExecutor
from any_agent.types import SampledSession
from any_agent.workflow import WorkflowLike
from trainer.batch import Group, without_signal
from trainer.manifests import Manifest

GROUP = "data-"
"""What a sampled group's id begins with; its item's position follows."""


class Dataset(Protocol):
    """What is trained on: a list of dictionaries, a Hugging Face dataset, or the like."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Episodes:
    """What is run on each item."""

    workflow: WorkflowLike
    kwargs: Mapping[str, Any] | None
    accept: Callable[[Any], bool] | None = None


class DatasetFed:
    """Sessions that a workflow samples, item by item, in an order that survives stops.

    Each position of the dataset is done with once: by the step that took its group, or because
    nothing came of it. What was under way when the trainer ended is run again.
    """

    def __init__(
        self,
        config: Config,
        dataset: Dataset,
        episodes: Episodes,
        executor: WorkflowExecutor,
    ) -> None:
        """``executor`` runs the episodes; it is started and stopped here."""
        self._config = config
        self._dataset = dataset
        self._episodes = episodes
        self._executor = executor
        self._begun = False
        self._positions = Positions(
            len(dataset),
            seed=config.train.seed,
            shuffle=config.train_dataset.shuffle,
            epochs=config.train.epochs,
        )
        self._left_out: set[int] = set()
        """Done with, and in no manifest yet."""
        self._lock = threading.Lock()

    @property
    def rejected(self) -> Mapping[str, int]:
        return self._executor.rejected

    @property
    def capacity(self) -> Capacity | None:
        return self._executor.capacity

    @property
    def epoch(self) -> float | None:
        return round(self._positions.epoch, 4)

    def begin(self, version: int) -> None:
        self._executor.start()
        self._begun = True
        self._executor.release(version)

    def stop(self) -> None:
        self._executor.stop()

    def next_batch(self, timeout: float) -> list[Group]:
        return list(
            self._executor.sessions_batch(
                self._items(),
                self._episodes.workflow,
                self._episodes.kwargs,
                group_size=self._config.sessions.group_size,
                should_accept_fn=self._episodes.accept,
                reject=self._reject,
                on_rejected=lambda position, _: self._leave_out([position]),
                timeout=timeout,
            )
        )

    def interrupt(self) -> None:
        self._executor.interrupt()

    @contextmanager
    def updating(self, version: int) -> Iterator[None]:
        """Calls of workflows to the engines wait meanwhile."""
        if not self._begun:
            yield
            return
        self._executor.hold()
        try:
            yield
        except BaseException:
            # Each engine says itself which weights it has.
            self._executor.release(None)
            raise
        self._executor.release(version)

    def positions_of(self, groups: Sequence[Group]) -> list[int]:
        with self._lock:
            return sorted({*_positions(group[0].group_id for group in groups), *self._left_out})

    def settle(self, taken: Manifest, step: int | None) -> None:
        if step is None:
            # Nobody wrote down that they are done with: the next manifest does.
            self._leave_out(taken.positions)
        else:
            with self._lock:
                self._left_out.difference_update(taken.positions)
            self._positions.consumed(taken.positions)
        if self._begun and (step is None or step < self._config.train.steps):
            # Before it began, a step was made again, and nobody waits for its room; after the last
            # one nobody wants what would come of it.
            self._executor.settled([f"{GROUP}{position}" for position in taken.positions])

    def state(self) -> dict[str, Any] | None:
        return self._positions.state()

    def load(self, state: Mapping[str, Any] | None) -> None:
        if state is not None:
            self._positions.load(dict(state))

    # ------------------------------------------------------------------------------------------

    def _items(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for position, index in self._positions:
            item = self._dataset[index]
            if not isinstance(item, Mapping):
                raise ConfigError(
                    f"item {index} of the dataset is a {type(item).__name__}: it must be a "
                    "dictionary, whose fields the workflow reads"
                )
            yield position, dict(item)

    def _reject(self, group: list[SampledSession]) -> str | None:
        sessions = self._config.sessions
        if len(group) < min(sessions.min_group_size, sessions.group_size):
            return "group_too_small"
        return without_signal(group, self._config.train)

    def _leave_out(self, positions: Sequence[int]) -> None:
        with self._lock:
            self._left_out.update(positions)
        self._positions.consumed(positions)


def _positions(group_ids: Iterator[str]) -> list[int]:
    return [int(id.removeprefix(GROUP)) for id in group_ids]
