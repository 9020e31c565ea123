"""Runs workflows on items of a dataset: one by one, in batches, ahead of the trainer."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from types import TracebackType
from typing import Any, Self, TypeVar

from any_agent.config import RolloutConfig
from any_agent.engine import InferenceEngine
from any_agent.errors import ConfigError, TooManyRequests
from any_agent.protocol import Capacity
from any_agent.rollout.board import Board
from any_agent.rollout.crew import Crew
from any_agent.rollout.episodes import Episodes
from any_agent.rollout.jobs import Accept, Item, Job, Reject, Stream, epochs
from any_agent.rollout.loop_thread import LoopThread
from any_agent.rollout.making import Workshop, is_same
from any_agent.types import GenerationHyperparameters, SampledSession
from any_agent.workflow import context
from any_agent.workflow.agent_service import AgentService
from any_agent.workflow.base import TensorDict
from any_agent.workflow.dump import TrajectoryDump
from any_agent.workflow.resolve import WorkflowLike

T = TypeVar("T")

_MOST_SUBMITTED = 100_000
"""Items that were submitted and not waited for."""


class WorkflowExecutor:
    """Runs episodes on an event loop of its own thread; call it from another one.

    ``engine`` is what workflows get to sample with: an :class:`~any_agent.engine.EnginePool`, or
    any engine; it is opened and closed with the executor if it is a context manager. ``agents``
    says where the calls of agents (classes with ``run``) go. ``sampling`` is what the run samples
    with, ``eval_sampling`` what evaluations do (default: the same): workflows find them in their
    context. ``dump`` writes what episodes return to files. ``timeout`` is the most seconds of an
    episode, ``discount`` what rewards of recorded trajectories run back with.

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
    ) -> None:
        self._engine = engine
        self._config = config
        self._workshop = Workshop(agents)
        self._version = 0
        self._thread = LoopThread("workflows")
        self._stack = AsyncExitStack()
        self._board = Board()
        episodes = Episodes(
            engine,
            lambda: self.version,
            sampling=sampling,
            eval_sampling=eval_sampling,
            timeout=timeout,
            discount=discount,
        )
        self._crew = Crew(episodes, config, self._board, dump)
        self._numbers = itertools.count()
        self._lent = 0
        """Sessions that were submitted, and handed out last."""
        self._stream: Stream | None = None
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

    def hold(self, timeout: float = 60.0) -> None:
        """Before a weight update: calls of workflows to the engine wait until :meth:`release`."""
        hold = getattr(self._engine, "hold", None)
        if hold is not None:
            self._thread.call(hold(), timeout)

    def release(self, version: int | None = None) -> None:
        """After it: calls go on under ``version``; None: under what the engines have."""

        async def release() -> None:
            if version is not None:
                self._version = version
            free = getattr(self._engine, "release", None)
            if free is not None:
                free(version)

        self._thread.call(release())

    @property
    def version(self) -> int:
        """Of the weights that an episode which begins now samples with."""
        return self._version if self._engine is None else self._engine.version

    @property
    def capacity(self) -> Capacity:
        """How many train sessions run, and how many wait to be trained on."""
        return self._crew.ledger.now()

    @property
    def rejected(self) -> Counter[str]:
        """Train sessions that were left out, by why: `failed`, `invalid`, `timeout`,
        `returned_none`, `not_accepted`, `unusable`, or what ``reject`` said."""
        return self._crew.rejected

    # -- one by one ----------------------------------------------------------------------------

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
        _load_torch()
        jobs = self._board.jobs
        with self._board.news:
            self._check()
            if len(jobs) >= _MOST_SUBMITTED:
                raise TooManyRequests(
                    f"{len(jobs)} items were submitted and not waited for: call wait"
                )
            number = task_id
            while number is None or (task_id is None and number in jobs):
                number = next(self._numbers)
            if number in jobs:
                raise ValueError(f"task_id {number} is in use")
            job = jobs[number] = Job(number, number, data, made, size, is_eval, should_accept_fn)
        self._thread.soon(self._crew.take, job)
        return number

    def wait(
        self, count: int, timeout: float | None = None, raise_timeout: bool = True
    ) -> list[TensorDict | None]:
        """What ``count`` submitted items became, None for each that was rejected.

        Of those that are done the ones that were submitted first. Raises TimeoutError after
        ``timeout`` seconds, or returns an empty list then; ValueError if fewer were submitted.
        """
        board = self._board
        if count < 1:
            raise ValueError(f"count is {count}: it must be at least 1")
        with board.news:
            if count > len(board.jobs):
                raise ValueError(f"{count} items are waited for, {len(board.jobs)} were submitted")
            sizes = sorted((job.size for job in board.jobs.values()), reverse=True)

        def ready() -> list[int] | None:
            if len(board.done) < count:
                return None
            return [number for number in board.jobs if number in board.done][:count]

        numbers = self._await(ready, timeout, sum(sizes[:count]))
        if numbers is None and raise_timeout:
            raise TimeoutError(self._shortfall(f"{len(board.done)} of {count} items are done"))
        return self._collect(numbers or [])

    def wait_for_task(
        self, task_id: int, timeout: float | None = None, raise_timeout: bool = True
    ) -> TensorDict | None:
        """What one submitted item became; None if it was rejected, or did not end in time.

        Raises TimeoutError, unless ``raise_timeout`` is off; ValueError for an id that nothing was
        submitted under, or whose result was handed out.
        """
        board = self._board
        with board.news:
            if task_id not in board.jobs:
                raise ValueError(f"task_id {task_id!r} was not submitted, or waited for already")
            # Those before it begin first.
            numbers = list(board.jobs)
            before = numbers[: numbers.index(task_id) + 1]
            wanted = sum(board.jobs[number].size for number in before)
        got = self._await(lambda: [task_id] if task_id in board.done else None, timeout, wanted)
        if got is None and raise_timeout:
            raise TimeoutError(self._shortfall(f"task {task_id} did not end in {timeout:g} s"))
        return self._collect(got)[0] if got else None

    def drop(self, task_ids: Iterable[int]) -> None:
        """Forget what was submitted under these ids: what runs of it is cancelled, and awaited.

        Ids that nothing is known of any more are passed over.
        """
        board = self._board
        with board.news:
            jobs = [board.jobs.pop(id) for id in task_ids if id in board.jobs]
        self._thread.call(self._crew.drop(jobs))
        with board.news:
            ended = [job for job in jobs if board.done.pop(job.position, None) is not None]
        sessions = sum(len(job.results) for job in ended if not job.is_eval)
        if sessions:
            self._thread.soon(self._crew.settle, sessions)

    def rollout_batch(
        self,
        data: Sequence[dict[str, Any]],
        workflow: WorkflowLike,
        workflow_kwargs: Mapping[str, Any] | None = None,
        group_size: int = 1,
    ) -> list[TensorDict]:
        """Run the workflow on all items and wait for all; what was not rejected, in their order.

        Nothing runs ahead: under fixed weights, for collecting data and for debugging.
        """
        numbers = [
            self.submit(item, workflow, workflow_kwargs, group_size=group_size) for item in data
        ]
        if not numbers:
            return []
        left = set(numbers)

        def ready() -> list[int] | None:
            left.difference_update(self._board.done)
            return None if left else numbers

        with self._board.news:
            wanted = sum(self._board.jobs[number].size for number in numbers)
        self._await(ready, None, wanted)
        return [result for result in self._collect(numbers) if result is not None]

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

        ``dataloader`` is iterated over and over. A batch has as many items as its ``batch_size``
        says, else so many that their sessions are ``rollout.batch_size``. Asking for the next
        batch says that the weights were updated with the one before. The loader and the workflow
        of the first call are gone on with: others raise ConfigError, ``workflow_kwargs`` and
        ``should_accept_fn`` of later calls are not looked at. Raises TimeoutError, TrainingError,
        and what the loader raises.
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
                "call: for others use another executor, or submit and wait"
            )
        self.settled(list(self._handed))
        jobs = self._batch(timeout)
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
                Stream(
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

    def _batch(self, timeout: float | None) -> list[Job]:
        stream = self._stream
        assert stream is not None

        def ready() -> list[Job] | None:
            return stream.take() if stream.whole() or stream.over() else None

        jobs = self._await(ready, timeout, 0)
        if jobs is None:
            raise TimeoutError(self._shortfall(stream.progress()))
        self._handed |= {job.group_id: len(job.results) for job in jobs}
        return jobs

    def _await(
        self, ready: Callable[[], list[T] | None], timeout: float | None, wanted: int
    ) -> list[T] | None:
        """What is ``ready``, once it is; None after ``timeout`` seconds.

        ``wanted``: submitted sessions that are waited for. What was handed out before is done with.
        """
        with self._board.news:
            self._check()
            lent, self._lent = self._lent, 0
        if lent:
            self._thread.soon(self._crew.settle, lent)
        self._thread.soon(self._crew.want, wanted)
        try:
            return self._board.wait_for(ready, timeout, lambda: self._crew.ledger.running == 0)
        finally:
            self._thread.soon(self._crew.want, -wanted)

    def _collect(self, numbers: Sequence[int]) -> list[TensorDict | None]:
        results = []
        with self._board.news:
            for number in numbers:
                job = self._board.jobs.pop(number)
                results.append(self._board.done.pop(number))
                self._lent += 0 if job.is_eval else len(job.results)
        return results

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
        _load_torch()
        count = getattr(loader, "batch_size", None)
        if isinstance(count, int) and count > 0:
            stream = Stream(epochs(loader), made, size, count * size, count, accept=accept)
        else:
            self._require_room(size)
            stream = Stream(epochs(loader), made, size, self._config.batch_size, accept=accept)
        self._begin(stream)

    def _begin(self, stream: Stream) -> None:
        with self._board.news:
            self._check()
        self._stream = stream
        self._thread.soon(self._crew.open, stream)

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


def _load_torch() -> None:
    """Here, and not where it is used first: the event loop would stand still for seconds."""
    import torch  # noqa: F401
