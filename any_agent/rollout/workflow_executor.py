"""`WorkflowExecutor`: runs workflows on items of a dataset, one by one, in batches, or ahead of the
trainer."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from itertools import count
from typing import Any, Self

from any_agent.config import RolloutConfig
from any_agent.data import ItemLoader, items_of
from any_agent.engine import InferenceEngine
from any_agent.errors import ConfigError, TooManyRequests
from any_agent.protocol.training import Capacity
from any_agent.rollout.episode_runner import EpisodeRunner
from any_agent.rollout.episode_scheduler import EpisodeScheduler, nothing_left
from any_agent.rollout.job_waits import JobWaits
from any_agent.rollout.jobs import (
    Accept,
    EpisodeJob,
    Item,
    JobQueue,
    JobStream,
    Reject,
    epochs,
)
from any_agent.runtime.event_loop import LoopThread
from any_agent.types import GenerationHyperparameters, SampledSession
from any_agent.workflow import AgentService, context
from any_agent.workflow.base import TensorDict
from any_agent.workflow.dump import TrajectoryDump
from any_agent.workflow.resolve import WorkflowCache, WorkflowLike, is_same

MAX_SUBMITTED = 100_000  # the most items that may be submitted without a wait for them


class WorkflowExecutor:
    """Runs episodes on the event loop of its own thread; call it from another thread.

    Workflows sample with ``engine``, an :class:`~any_agent.engine.EnginePool` or any other engine;
    a context manager is opened and closed with the executor. The calls of agents (classes with
    ``run``) go to ``agents``. ``sampling`` and ``eval_sampling`` (default: the same) are the
    sampling parameters in the workflows' context. ``dump`` writes episodes to files. ``timeout`` is
    the limit of an episode in seconds, ``discount`` the factor by which rewards of recorded
    trajectories are propagated, ``vocab_size`` the number of the trained model's token ids. With
    ``rollout.deterministic`` each call that an EnginePool gets has a seed derived from ``seed``; a
    seed of the call's own is used in its place.

    Train episodes begin while ``running <= rollout.max_concurrent`` and ``running + buffered <=
    (rollout.eta + 1) * rollout.batch_size``, all counted in sessions: runs of the workflow. An
    ended session is buffered until it is settled. An episode that fails, or returns None, is left
    out; too many in a row (``rollout.max_failures``) make waits raise TrainingError.
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
        seed: int = 0,
    ) -> None:
        self._engine = engine
        self._config = config
        self._version = 0
        self._newest = 0
        """The highest announced version."""
        self._stack = AsyncExitStack()
        episodes = EpisodeRunner(
            engine=engine,
            version=lambda: self.version,
            # One engine may still have old weights, while others have these.
            newest=lambda: None if engine is None else max(self._newest, self.version),
            vocab_size=vocab_size,
            sampling=sampling,
            eval_sampling=eval_sampling,
            timeout=timeout,
            discount=discount,
            seed=seed if config.deterministic else None,
        )
        self._thread = LoopThread("workflows")
        self._queue = JobQueue()
        self._scheduler = EpisodeScheduler(episodes, config, self._queue, dump)
        self._waits = JobWaits(self._queue, self._scheduler, self._thread)
        self._workflows = WorkflowCache(agents)
        self._numbers = count()
        self._stream: JobStream | None = None
        self._source: tuple[Any, Any, int] | None = None
        self._unsettled: dict[str, int] = {}
        """Sessions of each group that a batch returned and that is not settled."""

    def start(self) -> Self:
        """Open the engine and become ready for episodes; raise the engine's errors."""
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

    def __exit__(self, *error: object) -> None:
        self.stop()

    def interrupt(self) -> None:
        """End all waits, now and from now on, by InterruptedError; safe in a signal handler."""
        self._queue.interrupt()

    def pause(self) -> None:
        """Begin no train episodes; running ones and evaluations go on."""
        self._queue.paused = True

    def resume(self) -> None:
        """Begin train episodes again."""
        self._queue.paused = False
        self._thread.soon(self._scheduler.admit)

    def hold(self, version: int | None = None, timeout: float = 60.0) -> None:
        """Make the workflows' calls to the engine wait until :meth:`release`, for a weight update.

        ``version`` is the next one, whose tokens agents may get from engines that have it first.
        """
        self._newest = max(self._newest, version or 0)
        hold = getattr(self._engine, "hold", None)
        if hold is not None:
            self._thread.call(hold(), timeout)

    def release(self, version: int | None = None) -> None:
        """Let calls continue after a weight update, under ``version`` or, for None, the engines'
        own."""

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
        """The version of the weights for episodes that begin now."""
        return self._version if self._engine is None else self._engine.version

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of the executor's thread, on which the engine is open."""
        return self._thread.loop

    @property
    def capacity(self) -> Capacity:
        """The numbers of train sessions that run, and that wait to be trained on."""
        return self._scheduler.counts.capacity()

    @property
    def rejected(self) -> Counter[str]:
        """The numbers of train sessions that were left out, by reason: `failed`, `invalid`,
        `timeout`, `returned_none`, `not_accepted`, `unusable`, or a reason that ``reject``
        returned."""
        return self._scheduler.rejected

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
        """Submit an item for ``group_size`` runs of the workflow; return its id at once.

        Raises ConfigError for an object that is no workflow, ValueError for an id that is in use,
        TooManyRequests when too many submitted items were not waited for.
        """
        resolved, size = self._workflows.get(workflow, workflow_kwargs, group_size)
        _load_torch()
        jobs = self._queue.jobs
        with self._queue.changed:
            self._waits.check()
            if len(jobs) >= MAX_SUBMITTED:
                raise TooManyRequests(
                    f"{len(jobs)} items were submitted and not waited for: call wait"
                )
            number = task_id
            while number is None or (task_id is None and number in jobs):
                number = next(self._numbers)
            if number in jobs:
                raise ValueError(f"task_id {number} is in use")
            job = EpisodeJob(number, data, resolved, size, is_eval, should_accept_fn)
            jobs[number] = job
        self._thread.soon(self._scheduler.submit, job)
        return number

    def wait(
        self, count: int, timeout: float | None = None, raise_timeout: bool = True
    ) -> list[TensorDict | None]:
        """Return the results of ``count`` submitted items, None for each rejected one.

        The done items that were submitted first come first. After ``timeout`` seconds it raises
        TimeoutError, or returns an empty list. Raises ValueError if fewer items were submitted, or
        are left because another thread has waited for them.
        """
        if count < 1:
            raise ValueError(f"count is {count}: it must be at least 1")
        jobs = self._waits.first(count, timeout, raise_timeout)
        return [job.tensors for job in jobs]

    def wait_for_task(
        self, task_id: int, timeout: float | None = None, raise_timeout: bool = True
    ) -> TensorDict | None:
        """Return one submitted item's result; None if it was rejected, or did not end in time.

        Raises TimeoutError, unless ``raise_timeout`` is off; ValueError for an id that was not
        submitted, or whose result is returned to another caller.
        """
        job = self._waits.one(task_id, timeout, raise_timeout)
        return job.tensors if job is not None else None

    def wait_for_runs(
        self, task_id: int, timeout: float | None = None
    ) -> tuple[list[TensorDict], Counter[str]]:
        """Return the result of each run on one submitted item, and the reasons of failed runs.

        Raises as :meth:`wait_for_task`.
        """
        job = self._waits.one(task_id, timeout)
        assert job is not None
        return job.members(), job.lost

    def drop(self, task_ids: Iterable[int]) -> None:
        """Forget submitted items: cancel their runs, and wait for them. Unknown ids are skipped."""
        queue = self._queue
        with queue.changed:
            jobs = [queue.jobs.pop(id) for id in task_ids if id in queue.jobs]
            queue.changed.notify_all()
        self._thread.call(self._scheduler.drop(jobs))
        with queue.changed:
            ended = [job for job in jobs if job.position in queue.done]
            queue.done.difference_update(job.position for job in ended)
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

        Nothing runs ahead: it is for fixed weights, for collecting data and for debugging. ``data``
        is a list of items, or a batch of a torch DataLoader. Raises RolloutError with the reasons
        if no result is left; ValueError without items, TypeError and DatasetError for other data.
        """
        items = items_of(data)
        if not items:
            raise ValueError("rollout_batch was given no items: is the dataset empty?")
        numbers = [
            self.submit(item, workflow, workflow_kwargs, group_size=group_size) for item in items
        ]
        missing = "another thread waited for items of this batch, or dropped them"
        jobs = self._waits.all(numbers, None, missing) or []
        results = [job.tensors for job in jobs if job.tensors is not None]
        if not results:
            raise nothing_left(jobs, f"of {len(jobs)} items")
        return results

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

        ``dataloader`` is iterated repeatedly and yields items, lists of items, or columns, as
        torch's DataLoader does by default. A batch has the loader's ``batch_size`` of items, else
        items with ``rollout.batch_size`` sessions. A call means that the weights were updated with
        the previous batch. Later calls continue with the first call's loader and workflow: others
        raise ConfigError, and later ``workflow_kwargs`` and ``should_accept_fn`` are ignored.
        Raises TimeoutError, TrainingError, RolloutError after ``rollout.max_dull_groups`` items in
        a row without a result, and the loader's errors. After one of the last two the next call is
        a first one again, and all results that ran ahead are discarded.
        """
        if self._source is None and self._stream is None:
            resolved, size = self._workflows.get(workflow, workflow_kwargs, group_size)
            _load_torch()
            items: int | None = getattr(dataloader, "batch_size", None)
            sessions = self._config.batch_size
            if isinstance(items, int) and items > 0:
                sessions = items * size
            else:
                items = None
                self._require_room(size)
            accept = should_accept_fn
            begun = JobStream(epochs(dataloader), resolved, size, sessions, items, accept=accept)
            if isinstance(dataloader, ItemLoader):
                begun.items = dataloader.ahead()
                begun.on_rejected = lambda position, _: dataloader.consumed(position)
            self._start_stream(begun)
            self._source = (dataloader, workflow, group_size)
        elif self._source is None or not (
            self._source[0] is dataloader
            and is_same(self._source[1], workflow)
            and self._source[2] == group_size
        ):
            raise ConfigError(
                "prepare_batch continues with the dataloader, workflow and group_size of its first "
                "call: for others create another RemoteSGLangEngine (or WorkflowExecutor), or use "
                "rollout_batch or submit"
            )
        self.settled(list(self._unsettled))
        try:
            jobs = self._next_batch(timeout)
        except BaseException as error:
            stream = self._stream
            failure = stream.error if stream is not None else None
            if stream is not None and failure is not None and failure in (error, error.__cause__):
                # This error has ended the stream.
                self._stream = self._source = None
                self._thread.call(self._scheduler.close_stream(stream))
            raise
        if isinstance(dataloader, ItemLoader):
            dataloader.consumed(job.position for job in jobs)
        return [job.tensors for job in jobs if job.tensors is not None]

    def sessions_batch(
        self,
        items: Iterator[Item],
        workflow: WorkflowLike,
        workflow_kwargs: Mapping[str, Any] | None = None,
        *,
        group_size: int = 1,
        reject: Reject | None = None,
        on_rejected: Callable[[int, str], None] | None = None,
        timeout: float | None = None,
    ) -> list[list[SampledSession]]:
        """Return the trainer's next batch: groups with ``rollout.batch_size`` sessions or more.

        ``items`` yields positions and items, which are pulled in a thread when there is room; later
        calls continue with the first call's. Groups come in the order of their positions, and
        count as buffered until they are :meth:`settled`. ``on_rejected`` is called on the
        executor's thread with each position without a result, and the reason. After the end of the
        items a batch has the remaining groups, and then none. Raises as :meth:`prepare_batch`, and
        InterruptedError.
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
                    reject=reject,
                    on_rejected=on_rejected,
                )
            )
        return [job.members() for job in self._next_batch(timeout)]

    def settled(self, group_ids: Sequence[str]) -> None:
        """Release groups that were trained on, or never will be, so that others may begin."""
        sessions = sum(self._unsettled.pop(id, 0) for id in group_ids)
        if sessions:
            self._thread.soon(self._scheduler.settle, sessions)

    def _start_stream(self, stream: JobStream) -> None:
        with self._queue.changed:
            self._waits.check()
        self._stream = stream
        self._thread.soon(self._scheduler.open_stream, stream)

    def _require_room(self, group_size: int) -> None:
        if group_size > self._config.batch_size:
            raise ConfigError(
                f"group_size {group_size} is more than rollout.batch_size "
                f"{self._config.batch_size}, which counts sessions: lower the first or raise the "
                "second"
            )

    def _next_batch(self, timeout: float | None) -> list[EpisodeJob]:
        stream = self._stream
        assert stream is not None
        jobs = self._waits.batch(stream, timeout)
        self._unsettled |= {job.group_id: len(job.results) for job in jobs}
        return jobs

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
    """Import torch in the caller's thread, as its first import would block the event loop."""
    import torch  # noqa: F401
