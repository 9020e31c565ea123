"""The waits of other threads for the jobs of a `WorkflowExecutor`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from any_agent.rollout.episode_scheduler import EpisodeScheduler
from any_agent.rollout.jobs import EpisodeJob, JobQueue, JobStream
from any_agent.rollout.result_queue import unambiguous
from any_agent.runtime.event_loop import LoopThread
from any_agent.runtime.worker_pool import describe_starting


class JobWaits:
    """Waits for the jobs in ``queue``, which ``scheduler`` begins on the loop of ``thread``.

    Each wait lets as many train episodes begin as it needs. It raises the error that ended the
    executor, and InterruptedError.
    """

    def __init__(self, queue: JobQueue, scheduler: EpisodeScheduler, thread: LoopThread) -> None:
        self._queue = queue
        self._scheduler = scheduler
        self._thread = thread

    def first(self, count: int, timeout: float | None, raise_timeout: bool) -> list[EpisodeJob]:
        """Wait for this many jobs, of those that are done the ones that were submitted first.

        After the time-out it raises TimeoutError or returns []. Raises ValueError if fewer jobs are
        left.
        """
        queue = self._queue

        def ready() -> list[int] | None:
            if count > len(queue.jobs):
                raise ValueError(
                    f"{count} items are waited for, {len(queue.jobs)} are left: submit "
                    "more; another thread may have waited for the others, or dropped them"
                )
            if len(queue.done) < count:
                return None
            return [number for number in queue.jobs if number in queue.done][:count]

        jobs = self._wait(ready, timeout, count)
        if jobs is None and raise_timeout:
            raise TimeoutError(self._shortfall(f"{len(queue.done)} of {count} items are done"))
        return jobs or []

    def one(
        self, task_id: int, timeout: float | None, raise_timeout: bool = True
    ) -> EpisodeJob | None:
        """Wait for a job; after the time-out it raises TimeoutError or returns None."""
        missing = f"task_id {task_id!r} was not submitted, or waited for already"
        jobs = self.all([task_id], timeout, missing)
        if jobs is None and raise_timeout:
            raise TimeoutError(self._shortfall(f"task {task_id} did not end in {timeout:g} s"))
        return jobs[0] if jobs else None

    def all(self, ids: list[int], timeout: float | None, missing: str) -> list[EpisodeJob] | None:
        """Wait for all of these jobs; raise ValueError(missing) if one is not in the queue."""
        queue, left = self._queue, set(ids)

        def ready() -> list[int] | None:
            left.difference_update(queue.done)
            # A job that another caller has removed stays in `left`.
            if any(n not in queue.jobs for n in (islice(left, 1) if left else ids)):
                raise ValueError(missing)
            return None if left else ids

        with queue.changed:
            ready()
            count = list(queue.jobs).index(ids[-1]) + 1
        return self._wait(ready, timeout, count)

    def batch(self, stream: JobStream, timeout: float | None) -> list[EpisodeJob]:
        """Wait for a stream's next batch; [] after its end. Raises the stream's error."""

        def ready() -> list[EpisodeJob] | None:
            if stream.batch_ready() or stream.ended():
                return stream.pop_batch()
            if stream.error is not None:
                raise unambiguous(stream.error, "the dataloader")
            return None

        self._thread.soon(self._scheduler.begin_wait, 0)
        self._queue.check()
        jobs = self._queue.wait_for(ready, timeout, self._blocked)
        if jobs is None:
            raise TimeoutError(self._shortfall(stream.progress()))
        return jobs

    def check(self) -> None:
        """Raise the error that ended the executor; RuntimeError if it was not started."""
        self._queue.check()
        if not self._thread.started:
            raise RuntimeError("the executor was not started: call start(), or use `with`")

    def _wait(
        self, ready: Callable[[], list[int] | None], timeout: float | None, count: int
    ) -> list[EpisodeJob] | None:
        """Wait for the submitted jobs whose numbers ``ready`` returns; None after the time-out.

        They are among the ``count`` jobs that were submitted first: as many may begin, because
        jobs begin in this order.
        """
        queue = self._queue
        with queue.changed:
            self.check()
            ready()
            wanted = sum(job.size for job in islice(queue.jobs.values(), count))

        def pop_ready() -> list[EpisodeJob] | None:
            numbers = ready()
            if numbers is None:
                return None
            # Another thread that waits for the same jobs must see that they are removed.
            queue.changed.notify_all()
            queue.done.difference_update(numbers)
            return [queue.jobs.pop(number) for number in numbers]

        self._thread.soon(self._scheduler.begin_wait, wanted)
        returned = 0
        try:
            jobs = queue.wait_for(pop_ready, timeout, self._blocked)
            returned = sum(len(job.results) for job in jobs or () if not job.is_eval)
            return jobs
        finally:
            self._thread.soon(self._scheduler.end_wait, wanted, returned)

    def _blocked(self) -> str | None:
        if self._queue.paused and self._scheduler.counts.running == 0:
            return "the executor is paused, and no awaited episode has begun: call resume() first"
        return None

    def _shortfall(self, progress: str) -> str:
        rejected = self._scheduler.rejected
        if rejected:
            reasons = ", ".join(f"{n} {reason}" for reason, n in rejected.most_common())
            progress += f"; left out so far: {reasons}"
        if (starting := describe_starting()) is not None:
            progress += f"; {starting}"
        return progress + ("; the executor is paused" if self._queue.paused else "")
