"""Runs workflows on items of a dataset: one by one, in batches, ahead of the trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from types import TracebackType
from typing import Any, Self

from any_agent.config import RolloutConfig
from any_agent.engine import InferenceEngine
from any_agent.errors import ConfigError
from any_agent.protocol.rl import Capacity
from any_agent.rollout.episode_runner import EpisodeRunner
from any_agent.rollout.episode_scheduler import EpisodeScheduler
from any_agent.rollout.jobs import Accept, EpisodeJob, Item, JobStream, Reject, epochs
from any_agent.rollout.result_queue import ResultQueue, unmistakable
from any_agent.rollout.submissions import Submissions, load_torch
from any_agent.rollout.workflow_cache import WorkflowCache, is_same
from any_agent.runtime.event_loop import LoopThread
from any_agent.types import GenerationHyperparameters, SampledSession
from any_agent.workflow import context
from any_agent.workflow.agent_service import AgentService
from any_agent.workflow.base import TensorDict
from any_agent.workflow.dump import TrajectoryDump
from any_agent.workflow.resolve import WorkflowLike


class WorkflowExecutor(Submissions):
    """Runs episodes on an event loop of its own thread; call it from another one.

    ``engine`` is what workflows get to sample with: an :class:`~any_agent.engine.EnginePool`, or
    any engine; it is opened and closed with the executor if it is a context manager. ``agents``
    says where the calls of agents (classes with ``run``) go. ``sampling`` is what the run samples
    with, ``eval_sampling`` what evaluations do (default: the same): workflows find them in their
    context. ``dump`` writes what episodes return to files. ``timeout`` is the most seconds of an
    episode, ``discount`` what rewards of recorded trajectories run back with, ``vocab_size`` how
    many token ids the model that is trained knows.

    Train episodes begin while ``running <= rollout.max_concurrent`` and ``running + buffered <=
    (rollout.eta + 1) * rollout.batch_size``, all counted in sessions: runs of the workflow. What
    ended is buffered until it is settled. An episode that fails is left out; too many in a row
    (``rollout.max_failures``) make what waits raise TrainingError.
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
        """The highest version that it was told of."""
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
        board = ResultQueue()
        crew = EpisodeScheduler(episodes, config, board, dump)
        super().__init__(LoopThread("workflows"), board, crew, WorkflowCache(agents))
        self._stream: JobStream | None = None
        self._source: tuple[Any, Any, int] | None = None
        self._handed: dict[str, int] = {}
        """Sessions of each group that a batch took and that is not settled."""

    # -- its life ------------------------------------------------------------------------------

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
        self._board.interrupt()
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
        self._board.interrupt()

    def pause(self) -> None:
        """Begin no train episodes; what runs goes on, and so do evaluations."""
        self._board.paused = True

    def resume(self) -> None:
        """Begin train episodes again."""
        self._board.paused = False
        self._thread.soon(self._crew.admit)

    def hold(self, version: int | None = None, timeout: float = 60.0) -> None:
        """Before a weight update: calls of workflows to the engine wait until :meth:`release`.

        ``version`` is the one to come: agents may get tokens of it from engines that have it first.
        """
        self._newest = max(self._newest, version or 0)
        hold = getattr(self._engine, "hold", None)
        if hold is not None:
            self._thread.call(hold(), timeout)

    def release(self, version: int | None = None) -> None:
        """After it: calls go on under ``version``; None: under what the engines have."""

        async def release() -> None:
            if version is not None:
                self._version = version
                self._newest = max(self._newest, version)
            free = getattr(self._engine, "release", None)
            if free is not None:
                free(version)

        self._thread.call(release())

    @property
    def version(self) -> int:
        """Of the weights that an episode which begins now samples with."""
        return self._version if self._engine is None else self._engine.version

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of its thread, on which the engine is open."""
        return self._thread.loop

    @property
    def capacity(self) -> Capacity:
        """How many train sessions run, and how many wait to be trained on."""
        return self._crew.ledger.now()

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
        """The next batch, while episodes of the following ones go on; one dictionary per item.

        ``dataloader`` is iterated over and over: it gives items, lists of them, or, as a DataLoader
        of torch does by itself, columns. A batch has as many items as its ``batch_size``
        says, else so many that their sessions are ``rollout.batch_size``. Asking for the next
        batch says that the weights were updated with the one before. The loader and the workflow
        of the first call are gone on with: others raise ConfigError, ``workflow_kwargs`` and
        ``should_accept_fn`` of later calls are not looked at. Raises TimeoutError, TrainingError,
        RolloutError after ``rollout.max_dull_groups`` items in a row that came to nothing, and what
        the loader raises. After either of the last two the next call is a first one again: what
        ran ahead is thrown away.
        """
        if self._source is None and self._stream is None:
            self._begin_loader(dataloader, workflow, workflow_kwargs, should_accept_fn, group_size)
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
        self.settled(list(self._handed))
        try:
            jobs = self._batch(timeout)
        except BaseException as error:
            self._forget_if(error)
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
        """The next batch for the trainer: groups with ``rollout.batch_size`` sessions or more.

        ``items`` gives positions and items; of the first call they are gone on with. They are
        taken in a thread, when there is room for them. Groups come in the order of their
        positions, and count as buffered until they are :meth:`settled`. ``on_rejected`` is told,
        on the executor's thread, of each position that comes to nothing, and why. Once the items
        are at their end a batch has what is left, and then nothing. Raises as
        :meth:`prepare_batch`, and InterruptedError.
        """
        if self._stream is None:
            made, size = self._workshop.get(workflow, workflow_kwargs, group_size)
            self._require_room(size)
            self._begin(
                JobStream(
                    items,
                    made,
                    size,
                    self._config.batch_size,
                    sessions=True,
                    accept=should_accept_fn,
                    reject=reject,
                    on_rejected=on_rejected,
                )
            )
        return [job.members() for job in self._batch(timeout)]

    def settled(self, group_ids: Sequence[str]) -> None:
        """These groups of batches were trained on, or never will be: others may begin."""
        sessions = sum(self._handed.pop(id, 0) for id in group_ids)
        if sessions:
            self._thread.soon(self._crew.settle, sessions)

    # -- waiting -------------------------------------------------------------------------------

    def _batch(self, timeout: float | None) -> list[EpisodeJob]:
        stream = self._stream
        assert stream is not None

        def ready() -> list[EpisodeJob] | None:
            if stream.whole() or stream.over():
                return stream.take()
            if stream.error is not None:
                raise unmistakable(stream.error, "the dataloader")
            return None

        self._thread.soon(self._crew.waiting, 0)
        jobs = self._board.wait_for(ready, timeout, self._is_idle)
        if jobs is None:
            raise TimeoutError(self._shortfall(stream.progress()))
        self._handed |= {job.group_id: len(job.results) for job in jobs}
        return jobs

    # -- streams -------------------------------------------------------------------------------

    def _begin_loader(
        self,
        loader: Any,
        workflow: WorkflowLike,
        kwargs: Mapping[str, Any] | None,
        accept: Accept | None,
        group_size: int,
    ) -> None:
        made, size = self._workshop.get(workflow, kwargs, group_size)
        load_torch()
        count = getattr(loader, "batch_size", None)
        if isinstance(count, int) and count > 0:
            stream = JobStream(epochs(loader), made, size, count * size, count, accept=accept)
        else:
            self._require_room(size)
            stream = JobStream(epochs(loader), made, size, self._config.batch_size, accept=accept)
        self._begin(stream)

    def _begin(self, stream: JobStream) -> None:
        with self._board.news:
            self._check()
        self._stream = stream
        self._thread.soon(self._crew.open, stream)

    def _forget_if(self, error: BaseException) -> None:
        """Forget the stream where it is the one that ended by this error."""
        stream = self._stream
        if stream is None or stream.error is None:
            return
        if stream.error in (error, error.__cause__):
            self._stream = self._source = None
            self._thread.call(self._crew.close(stream))

    def _require_room(self, group_size: int) -> None:
        if group_size > self._config.batch_size:
            raise ConfigError(
                f"group_size {group_size} is more than rollout.batch_size "
                f"{self._config.batch_size}, which counts sessions: raise it, or lower the other"
            )

    # -- on the event loop ---------------------------------------------------------------------

    async def _open(self) -> None:
        engine: object = self._engine
        if isinstance(engine, AbstractAsyncContextManager):
            await self._stack.enter_async_context(engine)

    async def _close(self) -> None:
        await self._crew.stop()
        await context.close_clients()
        await self._stack.aclose()
