"""The jobs of `WorkflowExecutor`: items of a dataset, each with some runs of a workflow."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
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

    @property
    def needed(self) -> int:
        """The number of items, or else of sessions, of a batch."""
        return self.batch_items or self.batch_sessions

    def batch_ready(self) -> bool:
        return sum(self._sizes()) >= self.needed

    def next_job(self) -> EpisodeJob:
        """Return a job for the item that has waited longest."""
        # Before the item leaves `waiting`: another thread must not see an ended stream in between.
        self.running_jobs += 1
        position, data = self.waiting.popleft()
        workflow, size = self.workflow, self.group_size
        return EpisodeJob(position, data, workflow, size, accept=self.accept, stream=self)

    def ended(self) -> bool:
        """Return True if no further result will come."""
        return self.exhausted and not (self.waiting or self.running_jobs or self.pulling)

    def progress(self) -> str:
        """Describe the part of a batch that has come."""
        unit = "items" if self.batch_items else "sessions"
        return f"{sum(self._sizes())} of {self.needed} {unit} came"

    def pop_batch(self) -> list[EpisodeJob]:
        """Remove and return the oldest jobs that make a batch, in order; all if there are fewer."""
        self.ready.sort(key=lambda job: job.position)
        sums = enumerate(accumulate(self._sizes()), start=1)
        size = next((size for size, total in sums if total >= self.needed), len(self.ready))
        batch, self.ready = self.ready[:size], self.ready[size:]
        return batch

    def _sizes(self) -> list[int]:
        return [1 if self.batch_items else len(job.results) for job in self.ready]


@dataclass(slots=True, eq=False)
class EpisodeJob:
    """One item, on which the workflow runs ``size`` times."""

    position: int
    """The number of the item, which is the id of its task."""
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
        self.done: set[int] = set()
        """The numbers of the jobs whose runs have ended."""
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
