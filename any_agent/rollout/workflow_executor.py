"""`WorkflowExecutor` runs workflows on items of a dataset: singly, in batches, or ahead of the
trainer."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from itertools import count, islice
from types import TracebackType
from typing import Any, Self

from any_agent.config import RolloutConfig
from any_agent.data import items_of
from any_agent.engine import InferenceEngine
from any_agent.errors import ConfigError, TooManyRequests
from any_agent.protocol.rl import Capacity
from any_agent.rollout.episode_runner import EpisodeRunner
from any_agent.rollout.episode_scheduler import EpisodeScheduler, nothing_left
from any_agent.rollout.jobs import (
    Accept,
    EpisodeJob,
    Item,
    JobQueue,
    JobStream,
    Reject,
    epochs,
)
from any_agent.rollout.result_queue import unambiguous
from any_agent.runtime.event_loop import LoopThread
from any_agent.types import GenerationHyperparameters, SampledSession
from any_agent.workflow import AgentService, context
from any_agent.workflow.base import TensorDict
from any_agent.workflow.dump import TrajectoryDump
from any_agent.workflow.resolve import WorkflowCache, WorkflowLike, is_same

MAX_SUBMITTED = 100_000
"""Items that were submitted and not waited for."""


class WorkflowExecutor:
    """Runs episodes on an event loop of its own thread; call it from another one.

    ``engine`` is what workflows sample with: an :class:`~any_agent.engine.EnginePool`, or any
    engine; it is opened and closed with the executor if it is a context manager. ``agents`` says
    where the calls of agents (classes with ``run``) go. ``sampling`` is what the run samples with,
    ``eval_sampling`` what evaluations do (default: the same): workflows find them in their context.
    ``dump`` writes what episodes return to files. ``timeout`` is the most seconds of an episode,
    ``discount`` what rewards of recorded trajectories run back with, ``vocab_size`` how many token
    ids the model that is trained knows.

    Train episodes begin while ``running <= rollout.max_concurrent`` and ``running + buffered <=
    (rollout.eta + 1) * rollout.batch_size``, all counted in sessions: runs of the workflow. An
    ended session is buffered until it is settled. An episode that fails is left out; too many in a
    row (``rollout.max_failures``) make waits raise TrainingError.
    """

    def __init__(
        self,
        engine: InferenceEngine | None,
        config: RolloutConfig,
        *,
        agents: AgentService | None = None,
        sampling: GenerationHyperparameters | None = None,
        eval_sampling: GenerationHyperparameters | None = None,
        dump: TrajectoryDump | None = None,
        timeout: float | None = None,
        discount: float = 1.0,
        vocab_size: int | None = None,
    ) -> None:
        self._engine = engine
        self._config = config
        self._version = 0
        self._newest = 0
        """The highest version that was announced."""
        self._stack = AsyncExitStack()
        episodes = EpisodeRunner(
            engine,
            lambda: self.version,
            # One engine may be back with old weights, while others have these.
            newest=lambda: None if engine is None else max(self._newest, self.version),
            vocab_size=vocab_size,
            sampling=sampling,
            eval_sampling=eval_sampling,
            timeout=timeout,
            discount=discount,
        )
        self._thread = LoopThread("workflows")
        self._queue = JobQueue()
        self._scheduler = EpisodeScheduler(episodes, config, self._queue, dump)
        self._workflows = WorkflowCache(agents)
        self._numbers = count()
        self._stream: JobStream | None = None
        self._source: tuple[Any, Any, int] | None = None
        self._unsettled: dict[str, int] = {}
        """Sessions of each group that a batch returned and that is not settled."""

    # -- life cycle ----------------------------------------------------------------------------

    def start(self) -> Self:
        """Open the engine, and be ready for episodes; raises what the engine raises."""
        self._thread.start()
        try:
            self._thread.call(self._open())
        except BaseException:
            self._thread.stop()
            raise
        return self

    def stop(self) -> None:
        """Cancel the episodes under way, wait for them, and close the engine."""
        if not self._thread.started:
            return
        self._queue.interrupt()
        try:
            self._thread.call(self._close())
        finally:
            self._thread.stop()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def interrupt(self) -> None:
        """End all waits, now and from now on, by InterruptedError; safe in a signal handler."""
        self._queue.interrupt()

    def pause(self) -> None:
        """Begin no train episodes; running ones go on, and so do evaluations."""
        self._queue.paused = True

    def resume(self) -> None:
        """Begin train episodes again."""
        self._queue.paused = False
        self._thread.soon(self._scheduler.admit)

    def hold(self, version: int | None = None, timeout: float = 60.0) -> None:
        """Before a weight update: calls of workflows to the engine wait until :meth:`release`.

        ``version`` is the one to come: agents may get tokens of it from engines that have it first.
        """
        self._newest = max(self._newest, version or 0)
        hold = getattr(self._engine, "hold", None)
        if hold is not None:
            self._thread.call(hold(), timeout)

    def release(self, version: int | None = None) -> None:
        """After a weight update: calls go on under ``version``; None: under the engines' own."""

        async def release() -> None:
            if version is not None:
                self._version = version
                self._newest = max(self._newest, version)
            engine_release = getattr(self._engine, "release", None)
            if engine_release is not None:
                engine_release(version)

        self._thread.call(release())

    @property
    def version(self) -> int:
        """The version of the weights that an episode which begins now samples with."""
        return self._version if self._engine is None else self._engine.version

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of its thread, on which the engine is open."""
        return self._thread.loop

    @property
    def capacity(self) -> Capacity:
        """How many train sessions run, and how many wait to be trained on."""
        return self._scheduler.counts.capacity()

    @property
    def rejected(self) -> Counter[str]:
        """Train sessions that were left out, by reason: `failed`, `invalid`, `timeout`,
        `returned_none`, `not_accepted`, `unusable`, or a reason that ``reject`` returned."""
        return self._scheduler.rejected

    # -- submitted items -----------------------------------------------------------------------

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
        """Have the workflow run ``group_size`` times on an item; return its id at once.

        Raises ConfigError for an object that is no workflow, ValueError for an id that is in use,
        TooManyRequests when too many submitted items were not waited for.
        """
        resolved, size = self._workflows.get(workflow, workflow_kwargs, group_size)
        _load_torch()
        jobs = self._queue.jobs
        with self._queue.changed:
            self._check()
            if len(jobs) >= MAX_SUBMITTED:
                raise TooManyRequests(
                    f"{len(jobs)} items were submitted and not waited for: call wait"
                )
            number = task_id
            while number is None or (task_id is None and number in jobs):
                number = next(self._numbers)
            if number in jobs:
                raise ValueError(f"task_id {number} is in use")
            job = jobs[number] = EpisodeJob(
                number, number, data, resolved, size, is_eval, should_accept_fn
            )
        self._thread.soon(self._scheduler.submit, job)
        return number

    def wait(
        self, count: int, timeout: float | None = None, raise_timeout: bool = True
    ) -> list[TensorDict | None]:
        """Return the results of ``count`` submitted items, None for each that was rejected.

        Of the items that are done, those that were submitted first. Raises TimeoutError after
        ``timeout`` seconds, or returns an empty list then; ValueError if fewer were submitted, or
        are left because another thread waited for them, too, and was first.
        """
        queue = self._queue
        if count < 1:
            raise ValueError(f"count is {count}: it must be at least 1")
        with queue.changed:
            if count > len(queue.jobs):
                raise ValueError(f"{count} items are waited for, {len(queue.jobs)} were submitted")

        def ready() -> list[int] | None:
            if count > len(queue.jobs):
                raise ValueError(
                    f"{count} items are waited for, {len(queue.jobs)} are left: another thread "
                    "waited for the others, or dropped them"
                )
            if len(queue.done) < count:
                return None
            return [number for number in queue.jobs if number in queue.done][:count]

        results = self._wait(ready, timeout, count)
        if results is None and raise_timeout:
            raise TimeoutError(self._shortfall(f"{len(queue.done)} of {count} items are done"))
        return [result for _, result in results or ()]

    def wait_for_task(
        self, task_id: int, timeout: float | None = None, raise_timeout: bool = True
    ) -> TensorDict | None:
        """Return one submitted item's result; None if it was rejected, or did not end in time.

        Raises TimeoutError, unless ``raise_timeout`` is off; ValueError for an id that nothing was
        submitted under, or whose result was returned before, also while this waits for it.
        """
        queue = self._queue

        def require() -> None:
            if task_id not in queue.jobs:
                raise ValueError(f"task_id {task_id!r} was not submitted, or waited for already")

        def ready() -> list[int] | None:
            require()
            return [task_id] if task_id in queue.done else None

        with queue.changed:
            require()
            count = list(queue.jobs).index(task_id) + 1
        results = self._wait(ready, timeout, count)
        if results is None and raise_timeout:
            raise TimeoutError(self._shortfall(f"task {task_id} did not end in {timeout:g} s"))
        return results[0][1] if results else None

    def wait_for_runs(
        self, task_id: int, timeout: float | None = None
    ) -> tuple[list[TensorDict], Counter[str]]:
        """Return the result of each run on one submitted item, and why other runs have none.

        Raises as :meth:`wait_for_task`.
        """
        with self._queue.changed:
            job = self._queue.jobs.get(task_id)
        self.wait_for_task(task_id, timeout)
        assert job is not None
        return job.members(), job.lost

    def drop(self, task_ids: Iterable[int]) -> None:
        """Forget the items that were submitted under these ids: their runs are cancelled, and
        awaited. Unknown ids are skipped.
        """
        queue = self._queue
        with queue.changed:
            jobs = [queue.jobs.pop(id) for id in task_ids if id in queue.jobs]
            queue.changed.notify_all()
        self._thread.call(self._scheduler.drop(jobs))
        with queue.changed:
            ended = [job for job in jobs if queue.done.pop(job.position, None) is not None]
        sessions = sum(len(job.results) for job in ended if not job.is_eval)
        if sessions:
            self._thread.soon(self._scheduler.settle, sessions)

    def rollout_batch(
        self,
        data: Sequence[Mapping[str, Any]] | Mapping[str, Any],
        workflow: WorkflowLike,
        workflow_kwargs: Mapping[str, Any] | None = None,
        group_size: int = 1,
    ) -> list[TensorDict]:
        """Run the workflow on all items and return all accepted results, in the items' order.

        Nothing runs ahead: under fixed weights, for collecting data and for debugging. ``data`` is
        a list of items, or a batch of a torch DataLoader. Raises RolloutError, which says why, if
        nothing is left; ValueError without items, TypeError and DatasetError for data without any.
        """
        items = items_of(data)
        if not items:
            raise ValueError("rollout_batch was given no items: is the dataset empty?")
        numbers = [
            self.submit(item, workflow, workflow_kwargs, group_size=group_size) for item in items
        ]
        left = set(numbers)
        queue = self._queue

        def ready() -> list[int] | None:
            left.difference_update(queue.done)
            # An item that will not end here stays in `left`.
            if any(n not in queue.jobs for n in (islice(left, 1) if left else numbers)):
                raise ValueError("another thread waited for items of this batch, or dropped them")
            return None if left else numbers

        with queue.changed:
            count = list(queue.jobs).index(numbers[-1]) + 1
        ended = self._wait(ready, None, count) or []
        results = [result for _, result in ended if result is not None]
        if not results:
            raise nothing_left([job for job, _ in ended], f"of {len(ended)} items")
        return results

    # -- ahead of the trainer ------------------------------------------------------------------

    def prepare_batch(
        self,
        dataloader: Any,
        workflow: WorkflowLike,
        workflow_kwargs: Mapping[str, Any] | None = None,
        should_accept_fn: Accept | None = None,
        group_size: int = 1,
        timeout: float | None = None,
    ) -> list[TensorDict]:
        """Return the next batch, one dictionary per item, while later batches' episodes go on.

        ``dataloader`` is iterated over and over: it gives items, lists of them, or, as a DataLoader
        of torch does by itself, columns. A batch has as many items as its ``batch_size``
        says, else so many that their sessions are ``rollout.batch_size``. Asking for the next
        batch says that the weights were updated with the one before. Later calls go on with the
        loader and the workflow of the first call: others raise ConfigError, and later calls'
        ``workflow_kwargs`` and ``should_accept_fn`` are ignored. Raises TimeoutError,
        TrainingError, RolloutError after ``rollout.max_dull_groups`` items in a row without a
        result, and what the loader raises. After either of the last two the next call is a first
        one again: what ran ahead is thrown away.
        """
        if self._source is None and self._stream is None:
            self._start_loader(dataloader, workflow, workflow_kwargs, should_accept_fn, group_size)
            self._source = (dataloader, workflow, group_size)
        elif self._source is None or not (
            self._source[0] is dataloader
            and is_same(self._source[1], workflow)
            and self._source[2] == group_size
        ):
            raise ConfigError(
                "prepare_batch goes on with the dataloader, workflow and group_size of its first "
                "call: for others make another RemoteSGLangEngine (or WorkflowExecutor), or use "
                "rollout_batch or submit"
            )
        self.settled(list(self._unsettled))
        try:
            jobs = self._next_batch(timeout)
        except BaseException as error:
            self._forget_stream_ended_by(error)
            raise
        return [job.tensors for job in jobs if job.tensors is not None]

    def sessions_batch(
        self,
        items: Iterator[Item],
        workflow: WorkflowLike,
        workflow_kwargs: Mapping[str, Any] | None = None,
        *,
        group_size: int = 1,
        should_accept_fn: Accept | None = None,
        reject: Reject | None = None,
        on_rejected: Callable[[int, str], None] | None = None,
        timeout: float | None = None,
    ) -> list[list[SampledSession]]:
        """Return the trainer's next batch: groups with ``rollout.batch_size`` sessions or more.

        ``items`` gives positions and items; later calls go on with those of the first one. They
        are pulled in a thread, when there is room for them. Groups come in the order of their
        positions, and count as buffered until they are :meth:`settled`. ``on_rejected`` is called,
        on the executor's thread, with each position that has no result, and the reason. Once the
        items are at their end a batch has what is left, and then nothing. Raises as
        :meth:`prepare_batch`, and InterruptedError.
        """
        if self._stream is None:
            resolved, size = self._workflows.get(workflow, workflow_kwargs, group_size)
            self._require_room(size)
            self._start_stream(
                JobStream(
                    items,
                    resolved,
                    size,
                    self._config.batch_size,
                    sessions=True,
                    accept=should_accept_fn,
                    reject=reject,
                    on_rejected=on_rejected,
                )
            )
        return [job.members() for job in self._next_batch(timeout)]

    def settled(self, group_ids: Sequence[str]) -> None:
        """Report that these groups were trained on, or never will be: others may begin."""
        sessions = sum(self._unsettled.pop(id, 0) for id in group_ids)
        if sessions:
            self._thread.soon(self._scheduler.settle, sessions)

    # -- streams -------------------------------------------------------------------------------

    def _start_loader(
        self,
        loader: Any,
        workflow: WorkflowLike,
        kwargs: Mapping[str, Any] | None,
        accept: Accept | None,
        group_size: int,
    ) -> None:
        resolved, size = self._workflows.get(workflow, kwargs, group_size)
        _load_torch()
        items: int | None = getattr(loader, "batch_size", None)
        sessions = self._config.batch_size
        if isinstance(items, int) and items > 0:
            sessions = items * size
        else:
            items = None
            self._require_room(size)
        stream = JobStream(epochs(loader), resolved, size, sessions, items, accept=accept)
        self._start_stream(stream)

    def _start_stream(self, stream: JobStream) -> None:
        with self._queue.changed:
            self._check()
        self._stream = stream
        self._thread.soon(self._scheduler.open_stream, stream)

    def _forget_stream_ended_by(self, error: BaseException) -> None:
        """Close the stream if this error is the one that ended it."""
        stream = self._stream
        if stream is None or stream.error is None:
            return
        if stream.error in (error, error.__cause__):
            self._stream = self._source = None
            self._thread.call(self._scheduler.close_stream(stream))

    def _require_room(self, group_size: int) -> None:
        if group_size > self._config.batch_size:
            raise ConfigError(
                f"group_size {group_size} is more than rollout.batch_size "
                f"{self._config.batch_size}, which counts sessions: raise it, or lower the other"
            )

    # -- waiting -------------------------------------------------------------------------------

    def _next_batch(self, timeout: float | None) -> list[EpisodeJob]:
        stream = self._stream
        assert stream is not None

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
        self._unsettled |= {job.group_id: len(job.results) for job in jobs}
        return jobs

    def _wait(
        self, ready: Callable[[], list[int] | None], timeout: float | None, count: int
    ) -> list[tuple[EpisodeJob, TensorDict | None]] | None:
        """Wait for the submitted jobs whose numbers ``ready`` returns; None after the time-out.

        They are among the ``count`` jobs that were submitted first: as many may begin, because
        jobs begin in this order.
        """
        queue = self._queue
        with queue.changed:
            self._check()
            wanted = sum(job.size for job in islice(queue.jobs.values(), count))

        def pop_ready() -> list[tuple[EpisodeJob, TensorDict | None]] | None:
            numbers = ready()
            if numbers is None:
                return None
            # Another thread that waits for the same jobs must see that they are gone.
            queue.changed.notify_all()
            return [(queue.jobs.pop(n), queue.done.pop(n)) for n in numbers]

        self._thread.soon(self._scheduler.begin_wait, wanted)
        returned = 0
        try:
            results = queue.wait_for(pop_ready, timeout, self._blocked)
            returned = sum(len(job.results) for job, _ in results or () if not job.is_eval)
            return results
        finally:
            self._thread.soon(self._scheduler.end_wait, wanted, returned)

    def _blocked(self) -> str | None:
        if self._queue.paused and self._scheduler.counts.running == 0:
            return "the executor is paused, and no awaited episode has begun: call resume() first"
        return None

    def _check(self) -> None:
        """Raise the error that ended the executor, or RuntimeError if it was not started."""
        self._queue.check()
        if not self._thread.started:
            raise RuntimeError("the executor was not started: call start(), or use `with`")

    def _shortfall(self, progress: str) -> str:
        if self.rejected:
            reasons = ", ".join(f"{n} {reason}" for reason, n in self.rejected.most_common())
            progress += f"; left out so far: {reasons}"
        return progress + ("; the executor is paused" if self._queue.paused else "")

    # -- on the event loop ---------------------------------------------------------------------

    async def _open(self) -> None:
        engine: object = self._engine
        if isinstance(engine, AbstractAsyncContextManager):
            await self._stack.enter_async_context(engine)

    async def _close(self) -> None:
        await self._scheduler.stop()
        await context.close_clients()
        await self._stack.aclose()


def _load_torch() -> None:
    """Import torch in the caller's thread: its first import would block the event loop for
    seconds."""
    import torch  # noqa: F401
