"""The jobs of `WorkflowExecutor`: items of a dataset, each with some runs of a workflow."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from any_agent.data import gives_columns, items_of
from any_agent.rollout.result_queue import ResultQueue
from any_agent.types import SampledSession
from any_agent.workflow import RolloutWorkflow
from any_agent.workflow.base import TensorDict

Accept: TypeAlias = Callable[[TensorDict], bool]
"""A function that returns True for an item's trajectories, one batch of tensors, to train on."""
Reject: TypeAlias = Callable[[list[SampledSession]], str | None]
"""A function that returns the reason not to train on a group, or None."""
Item: TypeAlias = tuple[int, dict[str, Any]]
"""A position and the dataset's item at it."""


@dataclass(slots=True, eq=False)
class JobStream:
    """Items that begin one after the other, when there is room for them."""

    items: Iterator[Item]
    workflow: RolloutWorkflow
    group_size: int
    batch_sessions: int
    """The number of sessions of a batch, in which staleness is counted."""
    batch_items: int | None = None
    """The number of items of a batch that is counted in items."""
    sessions: bool = False
    """True for groups of sessions, False for tensors."""
    accept: Accept | None = None
    reject: Reject | None = None
    on_rejected: Callable[[int, str], None] | None = None
    waiting: deque[Item] = field(default_factory=deque)
    """Items that were pulled and have not begun."""
    pulling: bool = False
    exhausted: bool = False
    running_jobs: int = 0
    ready: list[EpisodeJob] = field(default_factory=list)
    fruitless: int = 0
    """The number of items in a row without a result."""
    error: BaseException | None = None
    """The error that ended the stream; no further item begins."""
    closed: bool = False
    """True once no caller wants results of the stream any more."""

    def batch_ready(self) -> bool:
        if self.batch_items is not None:
            return len(self.ready) >= self.batch_items
        return sum(len(job.results) for job in self.ready) >= self.batch_sessions

    def next_job(self) -> EpisodeJob:
        """Return a job for the item that has waited longest."""
        # Before the item leaves `waiting`: another thread must not see an ended stream in between.
        self.running_jobs += 1
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

    def ended(self) -> bool:
        """Return True if no further result will come."""
        return self.exhausted and not (self.waiting or self.running_jobs or self.pulling)

    def progress(self) -> str:
        """Describe the part of a batch that has come."""
        if self.batch_items is not None:
            return f"{len(self.ready)} of {self.batch_items} items came"
        sessions = sum(len(job.results) for job in self.ready)
        return f"{sessions} of {self.batch_sessions} sessions came"

    def pop_batch(self) -> list[EpisodeJob]:
        """Remove and return the oldest jobs that make a batch, in order; all if there are fewer."""
        self.ready.sort(key=lambda job: job.position)
        size = sessions = 0
        for job in self.ready:
            if self.batch_items is not None:
                if size >= self.batch_items:
                    break
            elif sessions >= self.batch_sessions:
                break
            size += 1
            sessions += len(job.results)
        batch, self.ready = self.ready[:size], self.ready[size:]
        return batch


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
    """The number of runs that have not ended."""
    results: dict[int, Any] = field(default_factory=dict)
    """The results by the number of their run in the group."""
    lost: Counter[str] = field(default_factory=Counter)
    """The reasons why the other runs have no result."""
    error: BaseException | None = None
    """The error of the first run that failed."""
    tensors: TensorDict | None = None
    """All results as one batch, if the caller wants tensors."""
    dropped: bool = False
    """True once no caller wants the result any more."""

    @property
    def group_id(self) -> str:
        return f"data-{self.position}"

    def members(self) -> list[Any]:
        """Return the results in the order of their runs."""
        return [self.results[k] for k in sorted(self.results)]


class JobQueue(ResultQueue):
    """Submitted jobs and their results, for :class:`~any_agent.rollout.WorkflowExecutor`."""

    def __init__(self) -> None:
        super().__init__("the executor")
        self.jobs: dict[int, EpisodeJob] = {}
        """Jobs whose result was not returned yet, by number, in the order of their submission."""
        self.done: dict[int, TensorDict | None] = {}
        """Results of the jobs that have ended; None for rejected ones."""
        self.paused = False


def epochs(loader: Any) -> Iterator[Item]:
    """Iterate over a loader repeatedly and number its items, whether it yields items, lists of
    them, or columns as torch's DataLoader does.

    Raises ValueError for an empty loader, TypeError for items that are no mappings, DatasetError
    for columns that cannot be converted into items.
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
            raise ValueError("the dataloader has no items: is it empty, or an exhausted iterator?")
