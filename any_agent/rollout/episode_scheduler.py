"""What the executor does on its event loop: begins episodes as there is room, and judges them."""

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
from any_agent.rollout.episode_runner import EpisodeOutcome, EpisodeRunner
from any_agent.rollout.failure_budget import FailureBudget, said
from any_agent.rollout.jobs import EpisodeJob, JobStream
from any_agent.rollout.result_queue import ResultQueue
from any_agent.rollout.session_counts import RolloutCounts
from any_agent.types import Row, SampledSession
from any_agent.workflow.dump import TrajectoryDump, rows_in
from any_agent.workflow.tensors import concat_padded_tensors, padded

log = logging.getLogger(__name__)

_STOPS_TIMEOUT = 10.0
"""Seconds that episodes have for ending when they are cancelled."""


class EpisodeScheduler:
    """Runs jobs: those that were submitted, and those of one stream. Of one event loop alone."""

    def __init__(
        self,
        episodes: EpisodeRunner,
        config: RolloutConfig,
        board: ResultQueue,
        dump: TrajectoryDump | None = None,
    ) -> None:
        self._episodes = episodes
        self._config = config
        self._board = board
        self._dump = dump
        self._failures = FailureBudget(config.max_failures)
        self._unusable = FailureBudget(config.max_failures)
        """Of the functions that judge what episodes return."""
        # A group may be larger than what may run at once.
        self._places = {kind: asyncio.Semaphore(config.max_concurrent) for kind in (False, True)}
        self._tasks: set[asyncio.Task[None]] = set()
        self._runs: dict[asyncio.Task[None], EpisodeJob] = {}
        """Tasks whose session counts as one that runs."""
        self._retry: asyncio.TimerHandle | None = None
        self._pending: deque[EpisodeJob] = deque()
        self._evals: deque[EpisodeJob] = deque()
        self._stream: JobStream | None = None
        self._wanted = 0
        """Submitted sessions that somebody waits for."""
        self._lent = 0
        """Submitted sessions that were handed out last, and count as buffered until more is asked
        for."""
        self.ledger = RolloutCounts(config)
        self.rejected: Counter[str] = Counter()

    async def stop(self) -> None:
        """Cancel what runs, and wait for it."""
        self._episodes.stopping = True
        if self._retry is not None:
            self._retry.cancel()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=_STOPS_TIMEOUT)
            if late:
                log.warning("%d episodes do not end although they are cancelled", len(late))

    # -- what callers bring --------------------------------------------------------------------

    def take(self, job: EpisodeJob) -> None:
        (self._evals if job.is_eval else self._pending).append(job)
        self.admit()

    async def drop(self, jobs: Sequence[EpisodeJob]) -> None:
        """Nobody wants what was submitted any more: cancel what runs of it, and wait for that."""
        for job in jobs:
            job.dropped = True
            queue = self._evals if job.is_eval else self._pending
            if job in queue:
                queue.remove(job)
        tasks = [task for task, job in self._runs.items() if job.dropped]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_STOPS_TIMEOUT)
        for job in jobs:
            if job.left and not job.is_eval:
                # Its other runs had ended, and were waiting for these.
                self.ledger.settle(len(job.results))
        self.admit()

    def open(self, stream: JobStream) -> None:
        self._stream = stream
        self.admit()

    async def close(self, stream: JobStream) -> None:
        """Nobody wants more of a stream: what is ready is thrown away, what runs is cancelled."""
        stream.closed = True
        if self._stream is stream:
            self._stream = None
        self.ledger.settle(sum(len(job.results) for job in stream.ready))
        stream.ready.clear()
        await self.drop(list({job for job in self._runs.values() if job.stream is stream}))

    def waiting(self, wanted: int) -> None:
        """Somebody waits, for so many submitted sessions; what was lent before is done with."""
        self._wanted += wanted
        self.ledger.settle(self._lent)
        self._lent = 0
        self.admit()

    def waited(self, wanted: int, lent: int) -> None:
        """He waits no longer, and was given so many submitted sessions."""
        self._wanted -= wanted
        self._lent += lent

    def settle(self, sessions: int) -> None:
        self.ledger.settle(sessions)
        self.admit()

    # -- beginning -----------------------------------------------------------------------------

    def admit(self, most: int | None = None) -> None:
        """Begin what there is room for, ``most`` train items at most."""
        if self._episodes.stopping or self._board.failed:
            return
        while self._evals and self.ledger.takes_eval(self._evals[0].size):
            self._begin(self._evals.popleft())
        if self._board.paused or (most is None and self._held_back()):
            return
        # What somebody waits for is not held up by what others were given and may still train on.
        wanted = self._wanted and self._wanted + self._lent
        stream = self._stream
        batch = stream.batch_sessions if stream is not None else self._config.batch_size
        for begun in itertools.count():
            if begun == most:
                return
            if self._pending and self.ledger.takes(self._pending[0].size, batch, wanted=wanted):
                self._begin(self._pending.popleft())
            elif stream is not None and self.ledger.takes(stream.group_size, batch):
                if not stream.waiting:
                    self._pull(stream)
                    return
                self._begin(stream.next_job())
            else:
                return

    def _held_back(self) -> bool:
        """While the service seems to be away one item at a time is tried, ever more seldom."""
        if not self._failures.passing:
            return False
        if self._retry is None:

            def again() -> None:
                self._retry = None
                self.admit(most=1)
                self._held_back()

            pause = self._failures.pause()
            self._retry = asyncio.get_running_loop().call_later(pause, again)
        return True

    def _begin(self, job: EpisodeJob) -> None:
        job.left = job.size
        self.ledger.begin(job.size, is_eval=job.is_eval)
        for k in range(job.size):
            self._runs[self._start(self._run(job, k))] = job

    def _pull(self, stream: JobStream) -> None:
        """Take as many items as there is room for, in a thread; they begin then."""
        if not stream.pulling and not stream.exhausted:
            stream.pulling = True
            free = self._config.max_concurrent - self.ledger.running
            self._start(self._take_items(stream, max(1, free // stream.group_size)))

    async def _take_items(self, stream: JobStream, count: int) -> None:
        try:
            items = await asyncio.to_thread(lambda: list(itertools.islice(stream.items, count)))
        except Exception as error:
            self._end(stream, error)
            return
        with self._board.news:
            stream.pulling = False
            stream.waiting += items
            stream.exhausted = len(items) < count
            self._board.news.notify_all()
        self.admit()

    def _end(self, stream: JobStream, error: Exception) -> None:
        """A stream cannot go on; with the trainer's, which is all that it does, all ends."""
        if stream.sessions:
            self._board.fail(error)
            return
        if self._stream is stream:
            self._stream = None
        with self._board.news:
            stream.error = stream.error or error
            self._board.news.notify_all()

    def _start(self, job: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(job)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        cut_off = self._runs.pop(task, None)
        if cut_off is not None:
            self.ledger.end(is_eval=cut_off.is_eval, kept=False)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A fault of ours: better an end than a wait without one.
            self._board.fail(error)

    # -- ending --------------------------------------------------------------------------------

    async def _run(self, job: EpisodeJob, k: int) -> None:
        async with self._places[job.is_eval]:
            number = self._failures.begin()
            outcome = await self._episodes.run(job, k)
        task = asyncio.current_task()
        assert task is not None
        self._runs.pop(task)
        self._count(outcome, job, f"task {job.task_id}, run {k}", number)
        if outcome.reason is None:
            job.results[k] = outcome.result
        else:
            job.lost[outcome.reason] += 1
            job.error = job.error or outcome.error
        job.left -= 1
        if job.left == 0:
            if self._dump is not None and job.results:
                rows = [row for one in job.members() for row in _rows(one)]
                await self._dump.write(rows, task_id=job.task_id, is_eval=job.is_eval)
            self._close(job)
        self.admit()

    def _count(self, outcome: EpisodeOutcome, job: EpisodeJob, what: str, number: int) -> None:
        kept = outcome.reason is None
        self.ledger.end(is_eval=job.is_eval, kept=kept)
        stats = stats_tracker.get("eval-rollout" if job.is_eval else "rollout")
        stats.scalar(accepted=float(kept))
        if job.is_eval:
            if outcome.error is not None:
                self._failures.tell(outcome.error, f"eval {what}")
            return
        if outcome.reason is not None:
            self.rejected[outcome.reason] += 1
        if outcome.error is None:
            self._failures.succeeded()
        else:
            self._fail_if(self._failures.failed(number, outcome.error, what))

    def _close(self, job: EpisodeJob) -> None:
        """All runs of a job have ended: it is done, or comes to nothing."""
        stream = job.stream
        if job.dropped or (stream is not None and stream.closed):
            if not job.is_eval:
                self.ledger.settle(len(job.results))
            return
        reason = self._judged(job) if job.results else job.lost.most_common(1)[0][0]
        if reason is not None and job.results:
            if not job.is_eval:
                self.rejected[reason] += len(job.results)
                self.ledger.settle(len(job.results))
            job.lost[reason] += len(job.results)
            job.results.clear()
            job.tensors = None
        if stream is not None and not stream.sessions:
            self._count_fruitless(stream, job)
        if stream is not None and reason is not None and stream.on_rejected is not None:
            # First: who sees that all is over must know of this one, too.
            stream.on_rejected(job.position, reason)
        with self._board.news:
            if stream is None:
                self._board.done[job.position] = job.tensors
            else:
                stream.under_way -= 1
                if job.results:
                    stream.ready.append(job)
            self._board.news.notify_all()

    def _count_fruitless(self, stream: JobStream, job: EpisodeJob) -> None:
        """Whoever waits for a batch of tensors would wait for ever where none is accepted."""
        stream.fruitless = 0 if job.results else stream.fruitless + 1
        most = self._config.max_dull_groups
        if stream.fruitless >= most:
            last = f"the last {most} items came to nothing; of the last one"
            self._end(stream, nothing_left([job], last))

    def _judged(self, job: EpisodeJob) -> str | None:
        """Why the results that there are must not be trained on; makes one batch of them."""
        number = self._unusable.begin()
        try:
            reason = self._judge(job)
        except TrainingError as error:
            # Whoever judges says that all of it is to end.
            self._board.fail(error)
            return "unusable"
        except Exception as error:
            job.error = job.error or error
            self._fail_if(self._unusable.failed(number, error, f"task {job.task_id}"))
            return "unusable"
        self._unusable.succeeded()
        return reason

    def _judge(self, job: EpisodeJob) -> str | None:
        members, stream = job.members(), job.stream
        if stream is None or not stream.sessions:
            job.tensors = concat_padded_tensors(members)
        if job.accept is not None:
            tensors = job.tensors or padded([row for one in members for row in _rows(one)])
            if not job.accept(tensors):
                return "not_accepted"
        return stream.reject(members) if stream is not None and stream.reject is not None else None

    def _fail_if(self, end: BaseException | None) -> None:
        if end is not None:
            self._board.fail(end)


def nothing_left(jobs: Sequence[EpisodeJob], what: str) -> RolloutError:
    """The error of a batch without a result: why, and what the first failure said."""
    lost: Counter[str] = sum((job.lost for job in jobs), Counter())
    why = ", ".join(f"{count} {reason}" for reason, count in lost.most_common())
    errors = [job.error for job in jobs if job.error is not None]
    first = f"; the first failure: {said(errors[0])}" if errors else ""
    return RolloutError(f"{what}, no session is left to train on: {why}{first}")


def _rows(result: Any) -> list[Row]:
    """Of one run's result."""
    return result.rows if isinstance(result, SampledSession) else rows_in(result)
