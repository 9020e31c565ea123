"""Keeps episodes coming while the trainer trains, and hands them out in batches."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from any_agent.client import RLClient
from any_agent.config import RolloutConfig
from any_agent.errors import AnyAgentError, Conflict
from any_agent.protocol import Capacity, Rejection
from any_agent.rollout.ranks import Ranks
from any_agent.rollout.staleness import free_slots
from any_agent.workflow import Episode, RolloutWorkflow

log = logging.getLogger(__name__)
T = TypeVar("T")

_CAPACITY_TTL = 15.0
_CAPACITY_EVERY = 1.0
_POLLS = 4
_ACK_PATIENCE = 60.0
_ACK_EVERY = 0.25


class RolloutExecutor:
    """Runs a workflow on an event loop of its own thread; the trainer calls it from another.

    ``reject`` looks at an episode and says why it is not worth training on, or None: such
    episodes are rejected at once and their slots refilled.
    """

    def __init__(
        self,
        make_ranks: Callable[[], Ranks],
        make_workflow: Callable[[RLClient, str], RolloutWorkflow],
        config: RolloutConfig,
        *,
        owner: str,
        reject: Callable[[Episode], str | None] = lambda _: None,
    ) -> None:
        self._make_ranks = make_ranks
        self._make_workflow = make_workflow
        self._config = config
        self._owner = owner
        self._reject = reject
        self._buffer: deque[Episode] = deque()
        self._held: set[str] = set()
        self._arrived = threading.Condition()
        self._failure: BaseException | None = None
        self._interrupted = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout", daemon=True)
        self._tasks: list[asyncio.Task[None]] = []
        self.capacity: Capacity | None = None
        """What the service last answered."""
        self.rejected: Counter[str] = Counter()
        """Sessions rejected before training, by reason."""

    def start(self) -> None:
        self._thread.start()
        self.call(self._start())

    def stop(self) -> None:
        """End the polls; what is leased and not acknowledged is handed out again later."""
        self.call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def call(self, coroutine: Coroutine[Any, Any, T], timeout: float = 120.0) -> T:
        """Run a coroutine on the executor's loop and wait for it."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result(timeout)

    @property
    def ranks(self) -> Ranks:
        """For use in coroutines given to :meth:`call`."""
        return self._ranks

    def prepare_batch(self, timeout: float | None = None) -> list[Episode]:
        """Wait until ``batch_size`` sessions have come; the oldest episodes with as many.

        Raises TimeoutError after ``timeout`` seconds, InterruptedError once :meth:`interrupt` was
        called, or what a poll failed with.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._arrived:
            while True:
                if self._interrupted:
                    raise InterruptedError
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

    def _shortfall(self, count: int) -> str:
        said = f"{count} of {self._config.batch_size} sessions came"
        if self.rejected:
            rejected = ", ".join(f"{n} {reason}" for reason, n in self.rejected.items())
            said += f"; rejected so far: {rejected}"
        return said

    def ack(self, trained: list[str], rejected: list[Rejection]) -> None:
        """Tell the service what became of a batch."""
        self.call(self._ack(trained, rejected), timeout=_ACK_PATIENCE + 300)

    # ------------------------------------------------------------------------------------------

    def _take(self) -> list[Episode]:
        batch: list[Episode] = []
        count = 0
        while count < self._config.batch_size:
            episode = self._buffer.popleft()
            batch.append(episode)
            count += len(episode)
        return batch

    async def _start(self) -> None:
        self._ranks = self._make_ranks()
        self._changed = asyncio.Event()
        workflows = [self._make_workflow(client, self._owner) for client in self._ranks.clients]
        jobs = [self._keep_capacity()]
        jobs += [self._poll(workflow) for workflow in workflows for _ in range(_POLLS)]
        for job in jobs:
            task = asyncio.create_task(job)
            task.add_done_callback(self._ended)
            self._tasks.append(task)

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._ranks.close()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            with self._arrived:
                self._failure = task.exception()
                self._arrived.notify_all()

    async def _keep_capacity(self) -> None:
        """Tell the ranks how many sessions are wanted: when something changed, and regularly."""
        limits = [0] * len(self._ranks)
        while True:
            self._changed.clear()
            try:
                now = await self._set_limits(limits)
                self.capacity = total = _sum(now)
                share, more = divmod(free_slots(total, self._config), len(now))
                wanted = [c.admitted + share + (rank < more) for rank, c in enumerate(now)]
                if wanted != limits:
                    await self._set_limits([*map(min, limits, wanted)])
                    await self._set_limits(wanted)
                    limits = wanted
            except AnyAgentError as error:
                if not error.retryable:
                    raise
                log.warning("could not set the capacity: %s; trying again", error.message)
            try:
                async with asyncio.timeout(_CAPACITY_EVERY):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _set_limits(self, limits: list[int]) -> list[Capacity]:
        return await self._ranks.all(
            lambda rank: self._ranks.clients[rank].set_capacity(
                limit=limits[rank],
                ttl=_CAPACITY_TTL,
                owner=self._owner,
                held=sorted(id for id in self._held if self._ranks.home(id) == rank),
            )
        )

    async def _poll(self, workflow: RolloutWorkflow) -> None:
        while True:
            try:
                episode = await workflow.arun_episode(None, None)  # type: ignore[arg-type]
            except AnyAgentError as error:
                if not error.retryable:
                    raise
                log.warning("no episode: %s; trying again", error.message)
                await asyncio.sleep(1.0)
                continue
            if episode:
                await self._receive(episode)

    async def _receive(self, episode: Episode) -> None:
        ids = [trajectory.session_id for trajectory in episode]
        self._held.update(ids)
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
            await self._ack([], [Rejection(session_id=id, reason=reason) for id in ids])
        self._changed.set()

    async def _ack(self, trained: list[str], rejected: list[Rejection]) -> None:
        """Each rank is told of its own sessions, all ranks at once."""
        home = self._ranks.home
        await self._ranks.all(
            lambda rank: self._ack_rank(
                self._ranks.clients[rank],
                [id for id in trained if home(id) == rank],
                [r for r in rejected if home(r.session_id) == rank],
            )
        )
        self._held.difference_update(trained, (r.session_id for r in rejected))
        self._changed.set()

    async def _ack_rank(
        self, client: RLClient, trained: list[str], rejected: list[Rejection]
    ) -> None:
        if not trained and not rejected:
            return
        try:
            await self._ack_all(client, trained, rejected)
        except Conflict:
            # The lease of some was lost meanwhile (another trainer, a very long step); the others
            # must not wait for their time-out.
            for one in [*(([id], []) for id in trained), *(([], [r]) for r in rejected)]:
                try:
                    await self._ack_all(client, *one)
                except Conflict as error:
                    log.error("a session may be handed out again: %s", error.message)

    async def _ack_all(
        self, client: RLClient, trained: list[str], rejected: list[Rejection]
    ) -> None:
        """All or none. An ack may be repeated, so a store full for a moment ends no run."""
        deadline = time.monotonic() + _ACK_PATIENCE
        while True:
            try:
                await client.ack(owner=self._owner, trained=trained, rejected=rejected)
                return
            except AnyAgentError as error:
                if not error.retryable or time.monotonic() > deadline:
                    raise
                log.warning("could not acknowledge: %s; trying again", error.message)
            await asyncio.sleep(_ACK_EVERY)


def _sum(ranks: list[Capacity]) -> Capacity:
    totals = {name: sum(getattr(c, name) for c in ranks) for name in Capacity.model_fields}
    return Capacity(**totals)
