"""`LeaseExecutor`: leases sessions of external agents in batches while the trainer trains."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NamedTuple, TypeVar

from any_agent.client.rl_client import RLClient
from any_agent.config import RolloutConfig
from any_agent.errors import AnyAgentError, NotFound, StoreFull
from any_agent.protocol.training import Capacity, Rejection
from any_agent.record import unpack_trajectories
from any_agent.rollout.capacity_keeper import CapacityKeeper
from any_agent.rollout.rank_clients import RANK_ENDED, AckSender, RankClients
from any_agent.rollout.result_queue import ResultQueue
from any_agent.runtime.event_loop import LoopThread
from any_agent.types import Trajectory
from any_agent.workflow import Episode

log = logging.getLogger(__name__)
T = TypeVar("T")

POLLS_PER_RANK = 2
_POLL_LENGTH = 30.0  # seconds of one long poll
ACK_TIMEOUT = 5.0
"""Seconds that a step waits for a rank's reply to an acknowledgement, which is repeated later."""
MAX_FAILED_POLLS = 5  # the number of internal errors in a row with which a rank may reply to polls
POLL_RETRY_DELAY = 1.0
_FOLLOW_INTERVAL = 0.5  # seconds between two looks at the fleet
_MAX_REPLAYED = 64  # the number of sessions that one request replays
_MAX_GROUPS_LISTED = 3


class Consumed(NamedTuple):
    """The use of a session by a batch."""

    step: int | None
    """The optimizer step that trained on it; None without one."""
    rejected: str | None = None
    """The reason why it was rejected, if it was."""


class LeaseExecutor:
    """Polls each rank on the event loop of its own thread; call it from another thread.

    It renews its leases from ``start`` on, and admits sessions and receives episodes from
    ``begin`` on. ``reject`` returns the reason not to train on an episode, or None: such episodes
    are rejected at once and their slots refilled. ``consumed`` has the sessions that batches used:
    a session that comes again, because its acknowledgement was lost, is only acknowledged again.
    """

    def __init__(
        self,
        make_ranks: Callable[[], RankClients],
        config: RolloutConfig,
        *,
        owner: str,
        consumed: Mapping[str, Consumed] | None = None,
        reject: Callable[[Episode], str | None] = lambda _: None,
    ) -> None:
        self._make_ranks = make_ranks
        self._config = config
        self._owner = owner
        self._consumed = consumed if consumed is not None else {}
        self._reject = reject
        self._buffer: deque[Episode] = deque()
        self._leased: set[str] = set()
        """The sessions leased and not yet acknowledged; changed on the loop's thread alone."""
        self._queue = ResultQueue("a poll", RuntimeError)
        self._stopping = False
        self._thread = LoopThread("rollout")
        self._tasks: list[asyncio.Task[None]] = []
        """The tasks that serve all ranks."""
        self._of_ranks: dict[int, list[asyncio.Task[None]]] = {}
        """The tasks of each rank."""
        self._begun = False
        self._ranks: RankClients
        self._keeper: CapacityKeeper
        self._acks: AckSender
        self.rejected: Counter[str] = Counter()
        """The numbers of sessions rejected before training, by reason."""

    def start(self) -> None:
        self._thread.start()
        self.call(self._start())

    def begin(self) -> None:
        """Admit sessions, and receive their episodes."""
        self.call(self._begin())

    def stop(self) -> None:
        """End the polls; leased sessions without an acknowledgement are leased again later."""
        self.call(self._stop())
        self._thread.stop()

    def call(self, coroutine: Coroutine[Any, Any, T], timeout: float = 120.0) -> T:
        """Run a coroutine on the executor's loop and wait for it."""
        return self._thread.call(coroutine, timeout)

    @property
    def ranks(self) -> RankClients:
        """The ranks' clients, for coroutines that run by :meth:`call`."""
        return self._ranks

    @property
    def admits(self) -> bool:
        """True once the ranks may admit what :meth:`begin` allows them."""
        return self._begun and self._keeper.admits

    @property
    def capacity(self) -> Capacity | None:
        """The sum of the ranks' last replies; None before each rank has replied."""
        return self._keeper.now

    def prepare_batch(self, timeout: float | None = None) -> list[Episode]:
        """Wait until ``batch_size`` sessions have come; return the oldest episodes with as many.

        With ``rollout.deterministic`` they are sorted by the ids of groups and sessions. With eta 0
        equal agents then make equal batches: at most ``batch_size`` sessions are admitted until the
        next weights, so a batch has all of them, in whatever order they came.

        Raises TimeoutError after ``timeout`` seconds, InterruptedError after :meth:`interrupt`, or
        the error of a failed poll.
        """

        def ready() -> list[Episode] | None:
            enough = sum(map(len, self._buffer)) >= self._config.batch_size
            return self._pop_batch() if enough else None

        batch = self._queue.wait_for(ready, timeout)
        if batch is None:
            raise TimeoutError(self._shortfall())
        return batch

    def interrupt(self) -> None:
        """End the wait for a batch, now and from now on; safe in a signal handler."""
        self._queue.interrupt()

    def ack(
        self, trained: list[str], rejected: list[Rejection], *, step: int | None = None
    ) -> None:
        """Report to each rank the use of its sessions by a batch, and the optimizer step.

        A rank that is away gets the report when it is back; until then its leases are renewed.
        """
        self.call(self._acks.send(trained, rejected, step=step, patience=ACK_TIMEOUT))

    def flush(self) -> None:
        """Wait a bounded time for the ranks that have not replied to acknowledgements."""
        self.call(self._acks.flush(patience=2 * ACK_TIMEOUT))

    def replay(self, session_ids: list[str], timeout: float) -> dict[str, Trajectory]:
        """Lease exactly these sessions again, even trained ones; return them by id.

        Raises Conflict or NotFound if one cannot be leased; then none of them is.
        """
        return self.call(self._replay(session_ids), timeout=timeout)

    def _shortfall(self) -> str:
        count = sum(map(len, self._buffer))
        text = f"{count} of {self._config.batch_size} sessions came"
        if self.rejected:
            rejected = ", ".join(f"{n} {reason}" for reason, n in self.rejected.items())
            text += f"; rejected so far: {rejected}"
        return text + (f"; {describe_waiting(self.capacity)}" if self.capacity is not None else "")

    def _pop_batch(self) -> list[Episode]:
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
            held=self._leased_at,
        )
        self._acks = AckSender(self._ranks, owner=self._owner, settled=self._settle)
        self._tasks = [self._task(self._keeper.run()), self._task(self._follow_fleet())]
        self._serve_ranks()

    async def _begin(self) -> None:
        self._keeper.open = self._begun = True
        self._keeper.changed.set()
        for rank in self._of_ranks:
            self._begin_polls(rank)

    def _begin_polls(self, rank: int) -> None:
        client = self._ranks.clients[rank]
        self._of_ranks[rank] += [self._task(self._poll(client)) for _ in range(POLLS_PER_RANK)]

    async def _follow_fleet(self) -> None:
        """Serve ranks that were added, and forget those that have ended, until cancelled."""
        while True:
            await asyncio.sleep(_FOLLOW_INTERVAL)
            ended = [rank for rank in self._of_ranks if self._ranks.ended(rank)]
            tasks = [task for rank in ended for task in self._of_ranks.pop(rank)]
            for task in tasks:
                task.remove_done_callback(self._task_ended)
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for rank in ended:
                self._settle(self._leased_at(rank))
            self._ranks.follow()
            self._serve_ranks()

    def _serve_ranks(self) -> None:
        for rank in self._ranks.present:
            if rank not in self._of_ranks:
                self._of_ranks[rank] = [self._task(self._acks.run(rank))]
                if self._begun:
                    self._begin_polls(rank)

    def _leased_at(self, rank: int) -> list[str]:
        return sorted(id for id in self._leased if self._ranks.home(id) == rank)

    def _task(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        task.add_done_callback(self._task_ended)
        return task

    async def _stop(self) -> None:
        self._stopping = True
        tasks = [*self._tasks, *(task for of_rank in self._of_ranks.values() for task in of_rank)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._ranks.close()

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """Count the end of a task before :meth:`stop` as a failure, also if it was cancelled."""
        if not self._stopping:
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            self._queue.fail(error or RuntimeError("a task of the executor ended"))

    async def _poll(self, client: RLClient) -> None:
        failed, full = 0, False
        while True:
            try:
                packed = await client.lease(owner=self._owner, wait=_POLL_LENGTH)
                if packed is None:
                    continue
                episode = unpack_trajectories(packed)
            except AnyAgentError as error:
                if error.code == RANK_ENDED:
                    # Until the next look at the fleet, which ends this task.
                    await asyncio.sleep(POLL_RETRY_DELAY)
                    continue
                # An internal error may concern one request alone, but retries are bounded.
                failed = 0 if error.retryable else failed + 1
                if not error.retryable and (error.status < 500 or failed > MAX_FAILED_POLLS):
                    raise
                if not isinstance(error, StoreFull) or not full:
                    log.warning("cannot lease episodes, and will try again: %s", error.message)
                # The wait for space has no bound, so it is logged once.
                full = isinstance(error, StoreFull)
                await asyncio.sleep(POLL_RETRY_DELAY)
                continue
            failed, full = 0, False
            # A session that is leased twice had an expired lease.
            fresh = [t for t in episode if t.session_id not in self._leased]
            self._leased.update(t.session_id for t in fresh)
            again = [t.session_id for t in fresh if t.session_id in self._consumed]
            await self._ack_again(again)
            if left := [t for t in fresh if t.session_id not in again]:
                await self._receive(left)

    async def _ack_again(self, session_ids: list[str]) -> None:
        for step in dict.fromkeys(self._consumed[id].step for id in session_ids):
            trained, rejected = [], []
            for id in session_ids:
                if self._consumed[id].step == step:
                    if (reason := self._consumed[id].rejected) is None:
                        trained.append(id)
                    else:
                        rejected.append(Rejection(session_id=id, reason=reason))
            await self._acks.send(trained, rejected, step=step, patience=ACK_TIMEOUT)

    async def _receive(self, episode: Episode) -> None:
        ids = [trajectory.session_id for trajectory in episode]
        try:
            reason = self._reject(episode)
        except Exception:
            # One agent's data must not end the training of all.
            log.exception("the episode of sessions %s cannot be used, and is rejected", ids)
            reason = "unusable"
        if reason is None:
            with self._queue.changed:
                self._buffer.append(episode)
                self._queue.changed.notify_all()
        else:
            self.rejected[reason] += len(ids)
            rejected = [Rejection(session_id=id, reason=reason) for id in ids]
            await self._acks.send([], rejected, patience=ACK_TIMEOUT)
        self._keeper.changed.set()

    async def _replay(self, session_ids: list[str]) -> dict[str, Trajectory]:
        async def lease(rank: int) -> list[Trajectory]:
            mine = [id for id in session_ids if self._ranks.home(id) == rank]
            out: list[Trajectory] = []
            for k in range(0, len(mine), _MAX_REPLAYED):
                packed = await self._ranks.clients[rank].replay(
                    owner=self._owner, session_ids=mine[k : k + _MAX_REPLAYED]
                )
                out += unpack_trajectories(packed)
            return out

        self._leased.update(session_ids)
        try:
            for rank in set(map(self._ranks.home, session_ids)):
                if self._ranks.ended(rank):
                    raise NotFound(
                        f"rank {rank} was drained and has ended", code="session_not_found"
                    )
            leased = await self._ranks.all(lease)
        except AnyAgentError:
            # Ranks take back leases that are not renewed.
            self._settle(session_ids)
            raise
        return {t.session_id: t for trajectories in leased for t in trajectories}

    def _settle(self, session_ids: list[str]) -> None:
        self._leased.difference_update(session_ids)
        self._keeper.changed.set()


def describe_waiting(now: Capacity) -> str:
    """Describe the open sessions, the ones that wait for a slot, and the groups that wait for
    members."""
    if not (now.running or now.waiting or now.unfilled):
        return "no agent has a session open, or waits for one"
    counts = f"{now.running} open, {now.waiting} waiting for a slot"
    groups = [
        f"group {group.group_id} has {group.members} of {group.size} sessions, and up to "
        f"{group.closes_in:.0f} s for the others (sessions.group_timeout)"
        for group in now.unfilled[:_MAX_GROUPS_LISTED]
    ]
    return "; ".join([counts, *groups])
