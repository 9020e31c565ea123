"""`EpisodeScheduler` begins episodes when there is room, and judges their results."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter, deque
from collections.abc import Coroutine, Sequence
from typing import Any

from any_agent import stats_tracker
from any_agent.config import RolloutConfig
from any_agent.errors import RolloutError, TrainingError
from any_agent.rollout.admission import RolloutCounts
from any_agent.rollout.episode_runner import EpisodeOutcome, EpisodeRunner
from any_agent.rollout.failure_budget import FailureBudget, format_error
from any_agent.rollout.jobs import EpisodeJob, JobQueue, JobStream
from any_agent.types import Row, SampledSession
from any_agent.workflow.dump import TrajectoryDump
from any_agent.workflow.tensors import concat_padded_tensors, rows_in

log = logging.getLogger(__name__)

_STOP_TIMEOUT = 10.0  # seconds that cancelled episodes have for ending


class EpisodeScheduler:
    """Runs submitted jobs and the jobs of one stream; used on one event loop alone."""

    def __init__(
        self,
        episodes: EpisodeRunner,
        config: RolloutConfig,
        queue: JobQueue,
        dump: TrajectoryDump | None = None,
    ) -> None:
        self._episodes = episodes
        self._config = config
        self._queue = queue
        self._dump = dump
        self._failures = FailureBudget(config.max_failures)
        self._unusable = FailureBudget(config.max_failures)
        """The failures of functions that judge results."""
        # A group may be larger than the number of runs at once.
        self._slots = {kind: asyncio.Semaphore(config.max_concurrent) for kind in (False, True)}
        self._tasks: set[asyncio.Task[None]] = set()
        self._runs: dict[asyncio.Task[None], EpisodeJob] = {}
        """The tasks whose sessions count as running."""
        self._retry: asyncio.TimerHandle | None = None
        self._pending: deque[EpisodeJob] = deque()
        self._evals: deque[EpisodeJob] = deque()
        self._stream: JobStream | None = None
        self._wanted = 0
        """The number of submitted sessions that callers wait for."""
        self._returned = 0
        """The number of submitted sessions that were returned last: buffered until the next
        wait."""
        self.counts = RolloutCounts(config)
        self.rejected: Counter[str] = Counter()

    async def stop(self) -> None:
        """Cancel the running episodes, and wait for them."""
        self._episodes.stopping = True
        if self._retry is not None:
            self._retry.cancel()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=_STOP_TIMEOUT)
            if late:
                log.warning("%d cancelled episodes have not ended within the time-out", len(late))

    def submit(self, job: EpisodeJob) -> None:
        (self._evals if job.is_eval else self._pending).append(job)
        self.admit()

    async def drop(self, jobs: Sequence[EpisodeJob]) -> None:
        """Cancel the runs of jobs that no caller wants any more, and wait for them."""
        for job in jobs:
            job.dropped = True
            queue = self._evals if job.is_eval else self._pending
            if job in queue:
                queue.remove(job)
        tasks = [task for task, job in self._runs.items() if job.dropped]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_STOP_TIMEOUT)
        for job in jobs:
            if job.left and not job.is_eval:
                # Its other runs had ended, and were buffered until these end.
                self.counts.settle(len(job.results))
        self.admit()

    def open_stream(self, stream: JobStream) -> None:
        self._stream = stream
        self.admit()

    async def close_stream(self, stream: JobStream) -> None:
        """Discard the results of a stream that no caller wants any more, and cancel its runs."""
        stream.closed = True
        if self._stream is stream:
            self._stream = None
        self.counts.settle(sum(len(job.results) for job in stream.ready))
        stream.ready.clear()
        await self.drop(list({job for job in self._runs.values() if job.stream is stream}))

    def begin_wait(self, wanted: int) -> None:
        """Count a caller's wait for ``wanted`` submitted sessions; settle the sessions that were
        returned before."""
        self._wanted += wanted
        self.counts.settle(self._returned)
        self._returned = 0
        self.admit()

    def end_wait(self, wanted: int, returned: int) -> None:
        """Count the end of a wait, which has ``returned`` so many submitted sessions."""
        self._wanted -= wanted
        self._returned += returned

    def settle(self, sessions: int) -> None:
        self.counts.settle(sessions)
        self.admit()

    def admit(self, limit: int | None = None) -> None:
        """Begin what there is room for, ``limit`` train items at most."""
        if self._episodes.stopping or self._queue.failed:
            return
        while self._evals and self.counts.admits_eval(self._evals[0].size):
            self._begin(self._evals.popleft())
        if self._queue.paused or (limit is None and self._backing_off()):
            return
        # Sessions that other callers got, and may still train on, do not block a wait.
        wanted = self._wanted and self._wanted + self._returned
        stream = self._stream
        batch = stream.batch_sessions if stream is not None else self._config.batch_size
        for begun in itertools.count():
            if begun == limit:
                return
            if self._pending and self.counts.admits(self._pending[0].size, batch, wanted=wanted):
                self._begin(self._pending.popleft())
            elif stream is not None and self.counts.admits(stream.group_size, batch):
                if not stream.waiting:
                    self._pull(stream)
                    return
                self._begin(stream.next_job())
            else:
                return

    def _backing_off(self) -> bool:
        """Return True while the service seems to be away: one item at a time is tried then, at
        growing intervals."""
        if not self._failures.transient:
            return False
        if self._retry is None:

            def retry() -> None:
                self._retry = None
                self.admit(limit=1)
                self._backing_off()

            delay = self._failures.next_delay()
            self._retry = asyncio.get_running_loop().call_later(delay, retry)
        return True

    def _begin(self, job: EpisodeJob) -> None:
        job.left = job.size
        self.counts.begin(job.size, is_eval=job.is_eval)
        for k in range(job.size):
            self._runs[self._start(self._run(job, k))] = job

    def _pull(self, stream: JobStream) -> None:
        """Pull as many items as there is room for, in a thread; they begin then."""
        if not stream.pulling and not stream.exhausted:
            stream.pulling = True
            free = self._config.max_concurrent - self.counts.running
            self._start(self._pull_items(stream, max(1, free // stream.group_size)))

    async def _pull_items(self, stream: JobStream, count: int) -> None:
        try:
            items = await asyncio.to_thread(lambda: list(itertools.islice(stream.items, count)))
        except Exception as error:
            self._end_stream(stream, error)
            return
        with self._queue.changed:
            stream.pulling = False
            stream.waiting += items
            stream.exhausted = len(items) < count
            self._queue.changed.notify_all()
        self.admit()

    def _end_stream(self, stream: JobStream, error: Exception) -> None:
        """End a stream by an error. The trainer's stream is its executor's only work, so the
        executor ends with it."""
        if stream.sessions:
            self._queue.fail(error)
            return
        if self._stream is stream:
            self._stream = None
        with self._queue.changed:
            stream.error = stream.error or error
            self._queue.changed.notify_all()

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        cancelled_job = self._runs.pop(task, None)
        if cancelled_job is not None:
            self.counts.end(is_eval=cancelled_job.is_eval, buffered=False)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A bug of the executor must end all waits.
            self._queue.fail(error)

    async def _run(self, job: EpisodeJob, k: int) -> None:
        async with self._slots[job.is_eval]:
            number = self._failures.begin()
            outcome = await self._episodes.run(job, k)
        task = asyncio.current_task()
        assert task is not None
        self._runs.pop(task)
        self._count(outcome, job, f"task {job.position}, run {k}", number)
        if outcome.reason is None:
            job.results[k] = outcome.result
        else:
            job.lost[outcome.reason] += 1
            job.error = job.error or outcome.error
        job.left -= 1
        if job.left == 0:
            if self._dump is not None and job.results:
                rows = [row for one in job.members() for row in _rows(one)]
                await self._dump.write(rows, task_id=job.position, is_eval=job.is_eval)
            self._finish(job)
        self.admit()

    def _count(self, outcome: EpisodeOutcome, job: EpisodeJob, name: str, number: int) -> None:
        accepted = outcome.reason is None
        self.counts.end(is_eval=job.is_eval, buffered=accepted)
        stats = stats_tracker.get("eval-rollout" if job.is_eval else "rollout")
        stats.scalar(accepted=float(accepted))
        if job.is_eval:
            if outcome.error is not None:
                self._failures.log(outcome.error, f"eval {name}")
            return
        if outcome.reason is not None:
            self.rejected[outcome.reason] += 1
        if outcome.error is None:
            self._failures.succeeded()
        elif (end := self._failures.failed(number, outcome.error, name)) is not None:
            self._queue.fail(end)

    def _finish(self, job: EpisodeJob) -> None:
        """Judge a job whose runs have all ended, and publish its result."""
        stream = job.stream
        if job.dropped or (stream is not None and stream.closed):
            if not job.is_eval:
                self.counts.settle(len(job.results))
            return
        reason = self._reason_to_reject(job) if job.results else job.lost.most_common(1)[0][0]
        if reason is not None and job.results:
            if not job.is_eval:
                self.rejected[reason] += len(job.results)
                self.counts.settle(len(job.results))
            job.lost[reason] += len(job.results)
            job.results.clear()
            job.tensors = None
        if stream is not None and not stream.sessions:
            self._count_fruitless(stream, job)
        if stream is not None and reason is not None and stream.on_rejected is not None:
            # Before the notification, so that a thread which sees the end knows of this job.
            stream.on_rejected(job.position, reason)
        with self._queue.changed:
            if stream is None:
                self._queue.done.add(job.position)
            else:
                stream.running_jobs -= 1
                if job.results:
                    stream.ready.append(job)
            self._queue.changed.notify_all()

    def _count_fruitless(self, stream: JobStream, job: EpisodeJob) -> None:
        """End a stream of tensors without accepted items, as no batch would ever be complete."""
        stream.fruitless = 0 if job.results else stream.fruitless + 1
        limit = self._config.max_dull_groups
        if stream.fruitless >= limit:
            last = f"the last {limit} items came to nothing; of the last one"
            self._end_stream(stream, nothing_left([job], last))

    def _reason_to_reject(self, job: EpisodeJob) -> str | None:
        """Combine the job's results; return the reason to reject them, or None."""
        number = self._unusable.begin()
        try:
            reason = self._judge(job)
        except TrainingError as error:
            # The judging function ends all training.
            self._queue.fail(error)
            return "unusable"
        except Exception as error:
            job.error = job.error or error
            end = self._unusable.failed(number, error, f"task {job.position}")
            if end is not None:
                self._queue.fail(end)
            return "unusable"
        self._unusable.succeeded()
        return reason

    def _judge(self, job: EpisodeJob) -> str | None:
        members, stream = job.members(), job.stream
        if stream is not None and stream.sessions:
            return stream.reject(members) if stream.reject is not None else None
        job.tensors = concat_padded_tensors(members)
        return "not_accepted" if job.accept is not None and not job.accept(job.tensors) else None


def nothing_left(jobs: Sequence[EpisodeJob], what: str) -> RolloutError:
    """Return the error of a batch without a result: the reasons, and the first failure."""
    lost: Counter[str] = sum((job.lost for job in jobs), Counter())
    reasons = ", ".join(f"{count} {reason}" for reason, count in lost.most_common())
    errors = [job.error for job in jobs if job.error is not None]
    first = f"; the first failure: {format_error(errors[0])}" if errors else ""
    return RolloutError(f"{what}, no session is left to train on: {reasons}{first}")


def _rows(result: Any) -> list[Row]:
    return result.rows if isinstance(result, SampledSession) else rows_in(result)
