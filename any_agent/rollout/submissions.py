"""Items that a script submits one by one, and waits for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count, islice
from typing import Any

from any_agent.data import items_of
from any_agent.errors import TooManyRequests
from any_agent.rollout.episode_scheduler import EpisodeScheduler, nothing_left
from any_agent.rollout.jobs import Accept, EpisodeJob
from any_agent.rollout.result_queue import ResultQueue
from any_agent.rollout.workflow_cache import WorkflowCache
from any_agent.runtime.event_loop import LoopThread
from any_agent.workflow.base import TensorDict
from any_agent.workflow.resolve import WorkflowLike

_MAX_SUBMITTED = 100_000
"""Items that were submitted and not waited for."""


class Submissions:
    """The part of :class:`~any_agent.rollout.WorkflowExecutor` that is asked for single items."""

    def __init__(
        self,
        thread: LoopThread,
        board: ResultQueue,
        crew: EpisodeScheduler,
        workshop: WorkflowCache,
    ) -> None:
        self._thread = thread
        self._board = board
        self._crew = crew
        self._workshop = workshop
        self._numbers = count()

    @property
    def rejected(self) -> Counter[str]:
        """Train sessions that were left out, by why: `failed`, `invalid`, `timeout`,
        `returned_none`, `not_accepted`, `unusable`, or what ``reject`` said."""
        return self._crew.rejected

    def submit(
        self,
        data: dict[str, Any],
        workflow: WorkflowLike,
        workflow_kwargs: Mapping[str, Any] | None = None,
        should_accept_fn: Accept | None = None,
        group_size: int = 1,
        task_id: int | None = None,
        is_eval: bool = False,
    ) -> int:
        """Have the workflow run ``group_size`` times on an item; returns at once, with an id.

        Raises ConfigError for what is no workflow, ValueError for an id that is in use,
        TooManyRequests when too much was submitted that nobody waited for.
        """
        made, size = self._workshop.get(workflow, workflow_kwargs, group_size)
        load_torch()
        jobs = self._board.jobs
        with self._board.news:
            self._check()
            if len(jobs) >= _MAX_SUBMITTED:
                raise TooManyRequests(
                    f"{len(jobs)} items were submitted and not waited for: call wait"
                )
            number = task_id
            while number is None or (task_id is None and number in jobs):
                number = next(self._numbers)
            if number in jobs:
                raise ValueError(f"task_id {number} is in use")
            job = jobs[number] = EpisodeJob(
                number, number, data, made, size, is_eval, should_accept_fn
            )
        self._thread.soon(self._crew.take, job)
        return number

    def wait(
        self, count: int, timeout: float | None = None, raise_timeout: bool = True
    ) -> list[TensorDict | None]:
        """What ``count`` submitted items became, None for each that was rejected.

        Of those that are done the ones that were submitted first. Raises TimeoutError after
        ``timeout`` seconds, or returns an empty list then; ValueError if fewer were submitted, or
        are left because another thread waited for them, too, and was first.
        """
        board = self._board
        if count < 1:
            raise ValueError(f"count is {count}: it must be at least 1")
        with board.news:
            if count > len(board.jobs):
                raise ValueError(f"{count} items are waited for, {len(board.jobs)} were submitted")

        def ready() -> list[int] | None:
            if count > len(board.jobs):
                raise ValueError(
                    f"{count} items are waited for, {len(board.jobs)} are left: another thread "
                    "waited for the others, or dropped them"
                )
            if len(board.done) < count:
                return None
            return [number for number in board.jobs if number in board.done][:count]

        got = self._await(ready, timeout, count)
        if got is None and raise_timeout:
            raise TimeoutError(self._shortfall(f"{len(board.done)} of {count} items are done"))
        return [result for _, result in got or ()]

    def wait_for_task(
        self, task_id: int, timeout: float | None = None, raise_timeout: bool = True
    ) -> TensorDict | None:
        """What one submitted item became; None if it was rejected, or did not end in time.

        Raises TimeoutError, unless ``raise_timeout`` is off; ValueError for an id that nothing was
        submitted under, or whose result was handed out, also while this waits for it.
        """
        board = self._board

        def require() -> None:
            if task_id not in board.jobs:
                raise ValueError(f"task_id {task_id!r} was not submitted, or waited for already")

        def ready() -> list[int] | None:
            require()
            return [task_id] if task_id in board.done else None

        with board.news:
            require()
            count = list(board.jobs).index(task_id) + 1
        got = self._await(ready, timeout, count)
        if got is None and raise_timeout:
            raise TimeoutError(self._shortfall(f"task {task_id} did not end in {timeout:g} s"))
        return got[0][1] if got else None

    def wait_for_runs(
        self, task_id: int, timeout: float | None = None
    ) -> tuple[list[TensorDict], Counter[str]]:
        """What each run on one submitted item returned, and why the other runs have no result.

        Raises as :meth:`wait_for_task`.
        """
        with self._board.news:
            job = self._board.jobs.get(task_id)
        self.wait_for_task(task_id, timeout)
        assert job is not None
        return job.members(), job.lost

    def drop(self, task_ids: Iterable[int]) -> None:
        """Forget what was submitted under these ids: what runs of it is cancelled, and awaited.

        Ids that nothing is known of any more are passed over.
        """
        board = self._board
        with board.news:
            jobs = [board.jobs.pop(id) for id in task_ids if id in board.jobs]
            board.news.notify_all()
        self._thread.call(self._crew.drop(jobs))
        with board.news:
            ended = [job for job in jobs if board.done.pop(job.position, None) is not None]
        sessions = sum(len(job.results) for job in ended if not job.is_eval)
        if sessions:
            self._thread.soon(self._crew.settle, sessions)

    def rollout_batch(
        self,
        data: Sequence[Mapping[str, Any]] | Mapping[str, Any],
        workflow: WorkflowLike,
        workflow_kwargs: Mapping[str, Any] | None = None,
        group_size: int = 1,
    ) -> list[TensorDict]:
        """Run the workflow on all items and wait for all; what was not rejected, in their order.

        Nothing runs ahead: under fixed weights, for collecting data and for debugging. ``data`` is
        a list of items, or a batch of a torch DataLoader. Raises RolloutError, which says why, if
        nothing is left; ValueError without items, TypeError and DatasetError for what gives none.
        """
        items = items_of(data)
        if not items:
            raise ValueError("rollout_batch was given no items: is the dataset empty?")
        numbers = [
            self.submit(item, workflow, workflow_kwargs, group_size=group_size) for item in items
        ]
        left = set(numbers)

        def ready() -> list[int] | None:
            left.difference_update(self._board.done)
            # Those that will not end here are left over in the end.
            if any(n not in self._board.jobs for n in (islice(left, 1) if left else numbers)):
                raise ValueError("another thread waited for items of this batch, or dropped them")
            return None if left else numbers

        with self._board.news:
            count = list(self._board.jobs).index(numbers[-1]) + 1
        got = self._await(ready, None, count) or []
        results = [result for _, result in got if result is not None]
        if not results:
            raise nothing_left([job for job, _ in got], f"of {len(got)} items")
        return results

    # ------------------------------------------------------------------------------------------

    def _await(
        self, ready: Callable[[], list[int] | None], timeout: float | None, count: int
    ) -> list[tuple[EpisodeJob, TensorDict | None]] | None:
        """The submitted jobs whose numbers are ``ready``, once they are; None after a while.

        ``count`` is how many jobs, of those that were submitted first, they are among: as many may
        begin, because they begin in this order.
        """
        with self._board.news:
            self._check()
            wanted = sum(job.size for job in islice(self._board.jobs.values(), count))
        board = self._board

        def taken() -> list[tuple[EpisodeJob, TensorDict | None]] | None:
            # At once: another thread may wait for the same. It looks again then, and is told.
            numbers = ready()
            if numbers is None:
                return None
            board.news.notify_all()
            return [(board.jobs.pop(n), board.done.pop(n)) for n in numbers]

        self._thread.soon(self._crew.waiting, wanted)
        lent = 0
        try:
            got = board.wait_for(taken, timeout, self._is_idle)
            lent = sum(len(job.results) for job, _ in got or () if not job.is_eval)
            return got
        finally:
            self._thread.soon(self._crew.waited, wanted, lent)

    def _is_idle(self) -> bool:
        return self._crew.ledger.running == 0

    def _check(self) -> None:
        """Raises what ended the executor, or why it cannot begin anything."""
        self._board.check()
        if not self._thread.started:
            raise RuntimeError("the executor was not started: call start(), or use `with`")

    def _shortfall(self, came: str) -> str:
        if self.rejected:
            why = ", ".join(f"{n} {reason}" for reason, n in self.rejected.most_common())
            came += f"; left out so far: {why}"
        return came + ("; the executor is paused" if self._board.paused else "")


def load_torch() -> None:
    """Here, and not where it is used first: the event loop would stand still for seconds."""
    import torch  # noqa: F401
