"""What the executor has to do: items of a dataset, each with some runs of a workflow on it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from any_agent.data import gives_columns, items_of
from any_agent.types import SampledSession
from any_agent.workflow import RolloutWorkflow
from any_agent.workflow.base import TensorDict

Accept: TypeAlias = Callable[[TensorDict], bool]
"""Whether an item's trajectories, as one batch of tensors, are to be trained on."""
Reject: TypeAlias = Callable[[list[SampledSession]], str | None]
"""Why a group is not worth training on, or None."""
Item: TypeAlias = tuple[int, dict[str, Any]]
"""A position and what the dataset has there."""


@dataclass(slots=True, eq=False)
class JobStream:
    """Items that come one after the other, as room is there for them."""

    items: Iterator[Item]
    workflow: RolloutWorkflow
    group_size: int
    batch_sessions: int
    """What a batch needs, and what staleness is counted in."""
    batch_items: int | None = None
    """What a batch needs instead, where it is counted in items."""
    sessions: bool = False
    """Whether groups of sessions are wanted, or else tensors."""
    accept: Accept | None = None
    reject: Reject | None = None
    on_rejected: Callable[[int, str], None] | None = None
    waiting: deque[Item] = field(default_factory=deque)
    """Taken from the items, and not begun."""
    pulling: bool = False
    exhausted: bool = False
    under_way: int = 0
    """Jobs."""
    ready: list[EpisodeJob] = field(default_factory=list)
    fruitless: int = 0
    """Items in a row that came to nothing."""
    error: BaseException | None = None
    """The error that ended it; nothing of it begins any more."""
    closed: bool = False
    """Nobody wants it any more."""

    def whole(self) -> bool:
        """Whether a batch is ready."""
        if self.batch_items is not None:
            return len(self.ready) >= self.batch_items
        return sum(len(job.results) for job in self.ready) >= self.batch_sessions

    def next_job(self) -> EpisodeJob:
        """Of the item that waits longest."""
        # First: who looks meanwhile must not find that nothing more will come.
        self.under_way += 1
        position, data = self.waiting.popleft()
        return EpisodeJob(
            position,
            position,
            data,
            self.workflow,
            self.group_size,
            accept=self.accept,
            stream=self,
        )

    def over(self) -> bool:
        """Whether nothing more will come."""
        return self.exhausted and not (self.waiting or self.under_way or self.pulling)

    def progress(self) -> str:
        """How much of a batch is there, in words."""
        if self.batch_items is not None:
            return f"{len(self.ready)} of {self.batch_items} items came"
        sessions = sum(len(job.results) for job in self.ready)
        return f"{sessions} of {self.batch_sessions} sessions came"

    def take(self) -> list[EpisodeJob]:
        """The oldest jobs that make a batch, in their order; all if there are fewer."""
        self.ready.sort(key=lambda job: job.position)
        taken: list[EpisodeJob] = []
        sessions = 0
        for job in self.ready:
            if self.batch_items is not None:
                if len(taken) >= self.batch_items:
                    break
            elif sessions >= self.batch_sessions:
                break
            taken.append(job)
            sessions += len(job.results)
        self.ready = self.ready[len(taken) :]
        return taken


@dataclass(slots=True, eq=False)
class EpisodeJob:
    """One item, on which the workflow runs ``size`` times."""

    position: int
    task_id: int | str
    data: dict[str, Any]
    workflow: RolloutWorkflow
    size: int
    is_eval: bool = False
    accept: Accept | None = None
    stream: JobStream | None = None
    left: int = 0
    """Runs that have not ended."""
    results: dict[int, Any] = field(default_factory=dict)
    """Of the runs that have one, by their number in the group."""
    lost: Counter[str] = field(default_factory=Counter)
    """Why the others have none."""
    error: BaseException | None = None
    """The error of the first one that failed."""
    tensors: TensorDict | None = None
    """All results as one, where that was asked for."""
    dropped: bool = False
    """Nobody wants it any more."""

    @property
    def group_id(self) -> str:
        return f"data-{self.position}"

    def members(self) -> list[Any]:
        """The results in the order of their runs."""
        return [self.results[k] for k in sorted(self.results)]


def epochs(loader: Any) -> Iterator[Item]:
    """A loader's items over and over, numbered; it gives items, lists of them, or columns as
    torch's DataLoader does.

    Raises ValueError for a loader that gives nothing, TypeError for items that are no mappings,
    DatasetError for columns that cannot be turned back into items.
    """
    position = 0
    while True:
        before = position
        for given in loader:
            single = isinstance(given, Mapping) and not gives_columns(loader)
            for item in [given] if single else items_of(given):
                yield position, dict(item)
                position += 1
        if position == before:
            raise ValueError("the dataloader gave nothing: is it empty, or an iterator at its end?")
