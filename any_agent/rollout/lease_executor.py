"""Keeps episodes coming while the trainer trains, and hands them out in batches."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NamedTuple, TypeVar

from any_agent.client.rl_client import RLClient
from any_agent.config import RolloutConfig
from any_agent.errors import AnyAgentError
from any_agent.protocol.rl import Capacity, Rejection
from any_agent.record import unpack_trajectories
from any_agent.rollout.acks import AckSender
from any_agent.rollout.awaited import describe_waiting
from any_agent.rollout.capacity_keeper import CapacityKeeper
from any_agent.rollout.rank_clients import RankClients
from any_agent.runtime.event_loop import LoopThread
from any_agent.types import Trajectory
from any_agent.workflow import Episode, RolloutWorkflow, trajectories_of

log = logging.getLogger(__name__)
T = TypeVar("T")

_POLLS = 2
"""Long polls per rank."""
_ACK_TIMEOUT = 5.0
"""Seconds that a step waits for a rank to hear what became of its sessions; it is told later."""
_MAX_FAILED_POLLS = 5
"""Internal errors in a row that a rank may answer a poll with."""
_POLL_RETRY_DELAY = 1.0
_REPLAYED_AT_ONCE = 64
_AMBIGUOUS_ERRORS = (TimeoutError, InterruptedError, asyncio.CancelledError)


class Consumed(NamedTuple):
    """What a batch made of a session."""

    step: int | None
    """The optimizer step that took it; None if there was none."""
    rejected: str | None = None
    """Why there was nothing in it to train on."""


class LeaseExecutor:
    """Runs a workflow per rank on an event loop of its own thread; the trainer calls it from
    another one.

    It renews the leases of what it holds from ``start`` on, and admits sessions and takes
    episodes from ``begin`` on. ``reject`` looks at an episode and says why it is not worth
    training on, or None: such episodes are rejected at once and their slots refilled.
    ``consumed`` holds the sessions that batches took: those that come again, because their
    acknowledgement was lost, are acknowledged again and nothing more.
    """

    def __init__(
        self,
        make_ranks: Callable[[], RankClients],
        make_workflow: Callable[[RLClient, str], RolloutWorkflow],
        config: RolloutConfig,
        *,
        owner: str,
        consumed: Mapping[str, Consumed] | None = None,
        reject: Callable[[Episode], str | None] = lambda _: None,
    ) -> None:
        self._make_ranks = make_ranks
        self._make_workflow = make_workflow
        self._config = config
        self._owner = owner
        self._consumed = consumed if consumed is not None else {}
        self._reject = reject
        self._buffer: deque[Episode] = deque()
        self._held: set[str] = set()
        """Leased and not yet acknowledged; changed on the loop's thread alone."""
        self._arrived = threading.Condition()
        self._failure: BaseException | None = None
        self._interrupted = False
        self._stopping = False
        self._thread = LoopThread("rollout")
        self._tasks: list[asyncio.Task[None]] = []
        self._ranks: RankClients
        self._keeper: CapacityKeeper
        self._acks: AckSender
        self.rejected: Counter[str] = Counter()
        """Sessions rejected before training, by reason."""

    def start(self) -> None:
        self._thread.start()
        self.call(self._start())

    def begin(self) -> None:
        """Admit sessions, and take the episodes that come of them."""
        self.call(self._begin())

    def stop(self) -> None:
        """End the polls; what is leased and not acknowledged is handed out again later."""
        self.call(self._stop())
        self._thread.stop()

    def call(self, coroutine: Coroutine[Any, Any, T], timeout: float = 120.0) -> T:
        """Run a coroutine on the executor's loop and wait for it."""
        return self._thread.call(coroutine, timeout)

    @property
    def ranks(self) -> RankClients:
        """For use in coroutines given to :meth:`call`."""
        return self._ranks

    @property
    def capacity(self) -> Capacity | None:
        """What the ranks answered last, as one."""
        return self._keeper.now

    def prepare_batch(self, timeout: float | None = None) -> list[Episode]:
        """Wait until ``batch_size`` sessions have come; the oldest episodes with as many.

        With ``rollout.deterministic`` sorted by the ids of groups and sessions. With eta 0 the
        batch is then the same whenever the agents are: no more than ``batch_size`` sessions are
        admitted until the next weights, so a batch is all of them, in whatever order they came.

        Raises TimeoutError after ``timeout`` seconds, InterruptedError once :meth:`interrupt` was
        called, or what a poll failed with.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._arrived:
            while True:
                if self._interrupted:
                    raise InterruptedError
                if isinstance(self._failure, _AMBIGUOUS_ERRORS):
                    # Raised as it is, it would be taken for the end of this wait.
                    raise RuntimeError(f"a poll failed: {self._failure!r}") from self._failure
                if self._failure is not None:
                    raise self._failure
                count = sum(map(len, self._buffer))
                if count >= self._config.batch_size:
                    return self._take()
                remaining = None if deadline is None else deadline - time.monotonic()
                if remaining is not None and remaining <= 0:
                    raise TimeoutError(self._shortfall(count))
                self._arrived.wait(remaining)

    def interrupt(self) -> None:
        """End the wait for a batch, now and from now on; safe in a signal handler."""
        self._interrupted = True
        with self._arrived:
            self._arrived.notify_all()

    def ack(
        self, trained: list[str], rejected: list[Rejection], *, step: int | None = None
    ) -> None:
        """Tell each rank what became of its sessions of a batch, and of which optimizer step.

        A rank that is away is told when it is back; until then they are held.
        """
        self.call(self._acks.send(trained, rejected, step=step, patience=_ACK_TIMEOUT))

    def flush(self) -> None:
        """Wait a moment for the ranks that were not told yet."""
        self.call(self._acks.flush(patience=2 * _ACK_TIMEOUT))

    def replay(self, session_ids: list[str], timeout: float) -> dict[str, Trajectory]:
        """Lease just these sessions again, also those that were trained on; by their ids.

        Raises Conflict or NotFound if one cannot be had; then none of them is held.
        """
        return self.call(self._replay(session_ids), timeout=timeout)

    # ------------------------------------------------------------------------------------------

    def _shortfall(self, count: int) -> str:
        said = f"{count} of {self._config.batch_size} sessions came"
        if self.rejected:
            rejected = ", ".join(f"{n} {reason}" for reason, n in self.rejected.items())
            said += f"; rejected so far: {rejected}"
        return said + (f"; {describe_waiting(self.capacity)}" if self.capacity is not None else "")

    def _take(self) -> list[Episode]:
        batch: list[Episode] = []
        count = 0
        while count < self._config.batch_size:
            episode = self._buffer.popleft()
            batch.append(episode)
            count += len(episode)
        if self._config.deterministic:
            for episode in batch:
                episode.sort(key=lambda trajectory: trajectory.session_id)
            batch.sort(key=lambda episode: (episode[0].group_id, episode[0].session_id))
        return batch

    async def _start(self) -> None:
        self._ranks = self._make_ranks()
        self._keeper = CapacityKeeper(
            self._ranks,
            self._config,
            owner=self._owner,
            held=lambda rank: sorted(id for id in self._held if self._ranks.home(id) == rank),
        )
        self._acks = AckSender(self._ranks, owner=self._owner, settled=self._settled)
        self._run(self._keeper.run())
        for rank in range(len(self._ranks)):
            self._run(self._acks.run(rank))

    async def _begin(self) -> None:
        self._keeper.open = True
        self._keeper.changed.set()
        for client in self._ranks.clients:
            workflow = self._make_workflow(client, self._owner)
            for _ in range(_POLLS):
                self._run(self._poll(workflow))

    def _run(self, job: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(job)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    async def _stop(self) -> None:
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._ranks.close()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """What ends before :meth:`stop` is a failure, also where something cancelled it."""
        if self._stopping:
            return
        with self._arrived:
            self._failure = asyncio.CancelledError() if task.cancelled() else task.exception()
            self._arrived.notify_all()

    async def _poll(self, workflow: RolloutWorkflow) -> None:
        failed = 0
        while True:
            try:
                result = await workflow.arun_episode(None, None)  # type: ignore[arg-type]
                episode = trajectories_of(result)
            except AnyAgentError as error:
                # An internal error may be one request's, but for ever it is not waited for.
                failed = 0 if error.retryable else failed + 1
                if not error.retryable and (error.status < 500 or failed > _MAX_FAILED_POLLS):
                    raise
                log.warning("no episode: %s; trying again", error.message)
                await asyncio.sleep(_POLL_RETRY_DELAY)
                continue
            failed = 0
            # What is held already was handed out twice: its lease had run out, or seemed to.
            fresh = [t for t in episode if t.session_id not in self._held]
            self._held.update(t.session_id for t in fresh)
            again = [t.session_id for t in fresh if t.session_id in self._consumed]
            if again:
                await self._ack_again(again)
            if left := [t for t in fresh if t.session_id not in again]:
                await self._receive(left)

    async def _ack_again(self, session_ids: list[str]) -> None:
        again = {id: self._consumed[id] for id in session_ids}
        for step in dict.fromkeys(taken.step for taken in again.values()):
            of_step = {id: taken for id, taken in again.items() if taken.step == step}
            await self._acks.send(
                [id for id, taken in of_step.items() if taken.rejected is None],
                [
                    Rejection(session_id=id, reason=taken.rejected)
                    for id, taken in of_step.items()
                    if taken.rejected is not None
                ],
                step=step,
                patience=_ACK_TIMEOUT,
            )

    async def _receive(self, episode: Episode) -> None:
        ids = [trajectory.session_id for trajectory in episode]
        try:
            reason = self._reject(episode)
        except Exception:
            # One agent's data must not end the training of all.
            log.exception("an episode of %s cannot be used", ids)
            reason = "unusable"
        if reason is None:
            with self._arrived:
                self._buffer.append(episode)
                self._arrived.notify_all()
        else:
            self.rejected[reason] += len(ids)
            rejected = [Rejection(session_id=id, reason=reason) for id in ids]
            await self._acks.send([], rejected, patience=_ACK_TIMEOUT)
        self._keeper.changed.set()

    async def _replay(self, session_ids: list[str]) -> dict[str, Trajectory]:
        async def lease(rank: int) -> list[Trajectory]:
            mine = [id for id in session_ids if self._ranks.home(id) == rank]
            out: list[Trajectory] = []
            for k in range(0, len(mine), _REPLAYED_AT_ONCE):
                packed = await self._ranks.clients[rank].replay(
                    owner=self._owner, session_ids=mine[k : k + _REPLAYED_AT_ONCE]
                )
                out += unpack_trajectories(packed)
            return out

        self._held.update(session_ids)
        try:
            leased = await self._ranks.all(lease)
        except AnyAgentError:
            # Nobody settles them: ranks take back what their trainer does not hold.
            self._settled(session_ids)
            raise
        return {t.session_id: t for trajectories in leased for t in trajectories}

    def _settled(self, session_ids: list[str]) -> None:
        self._held.difference_update(session_ids)
        self._keeper.changed.set()
