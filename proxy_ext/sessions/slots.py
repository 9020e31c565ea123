"""Slots for train sessions: a cap on sessions ever admitted, and a fair, bounded queue.

The cap is absolute (`limit` sessions ever), so a repeated or lost capacity message changes nothing.
Slots are granted in the order of the requests; a group requests those of all its members at once.

Beside them, slots are granted one by one. Each is for one session without a group, which is trained
on elsewhere: only exports get it, and it opens even without a training. Both counts of
grants are permanent, so that as many sessions are opened on grants as there were grants, over
restarts too. The run's own trainer has grants of its own, which no other caller may use.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from itertools import islice

from pydantic import BaseModel

from any_agent.errors import AnyAgentError, Conflict, TooManyRequests
from proxy_ext.journal.base import Journal, KeepAnswer, PutMeta

MAX_SHOWN = 64  # entries of the queue that the trainer sees
RECALL_SECONDS = 3.0
"""Time within which a refused client retries: its 429's Retry-After and a margin."""


class Ticket:
    """An entry of the queue; ``granted`` once it has its slots."""

    __slots__ = ("future", "refused", "slots")

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.refused: AnyAgentError | None = None
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def granted(self) -> bool:
        return self.future.done() and not self.future.cancelled()

    async def wait(self, seconds: float) -> bool:
        """Wait for the slots and return whether they were granted; raise the queue's refusal."""
        if not self.future.done() and seconds > 0:
            await asyncio.wait([self.future], timeout=seconds)
        if self.refused is not None:
            raise self.refused
        return self.granted


class Admission:
    """The cap and the queue of one rank. ``admitted`` includes slots of members not open yet."""

    def __init__(self, *, admitted: int = 0, max_waiting: int) -> None:
        self.admitted = admitted
        self._limit = 0
        self._limit_expires: float | None = None
        """None: no cap was set yet."""
        self._max_waiting = max_waiting
        self._queue: deque[Ticket] = deque()
        self._refused: dict[str, tuple[int, float]] = {}
        self._closed: AnyAgentError | None = None

    @property
    def limit(self) -> int:
        """The cap in force; nothing more is admitted once its setter is silent."""
        return self.admitted if self._limit_expired else self._limit

    @property
    def limited(self) -> bool:
        """True while a trainer sets the cap."""
        return not self._limit_expired

    @property
    def _limit_expired(self) -> bool:
        return self._limit_expires is None or time.monotonic() >= self._limit_expires

    @property
    def no_slot_reason(self) -> str:
        """The reason that no slot is free."""
        if self._limit_expires is None:
            return (
                "no trainer has set a limit yet (it loads its model, or repeats steps since its "
                "checkpoint: the service's console says `trainer ready`; or none runs)"
            )
        if self._limit_expired:
            return "the trainer has sent nothing for a while (it restarts, or is gone)"
        return "the trainer has as many sessions as it wants now"

    @property
    def waiting(self) -> int:
        """Number of slots that opens wait for."""
        return sum(ticket.slots for ticket in self._queue)

    @property
    def queue(self) -> list[int]:
        """The slots that are wanted: by opens that wait, then by those lately refused."""
        now = time.monotonic()
        self._refused = {key: ask for key, ask in self._refused.items() if ask[1] > now}
        waiting = [ticket.slots for ticket in islice(self._queue, MAX_SHOWN)]
        return [*waiting, *(slots for slots, _ in self._refused.values())]

    def remember(self, key: str, slots: int) -> None:
        """Show a refused request, which did not wait, in the queue for a while.

        Where free slots are shared with other ranks, there might otherwise never be enough of them
        here at the moment of a request.
        """
        if len(self._refused) < MAX_SHOWN or key in self._refused:
            self._refused[key] = (slots, time.monotonic() + RECALL_SECONDS)

    def forget(self, key: str) -> None:
        self._refused.pop(key, None)

    def set_limit(self, limit: int, ttl: float) -> None:
        self._limit = limit
        self._limit_expires = time.monotonic() + ttl
        self._grant()

    def request(self, slots: int) -> Ticket:
        """Queue for slots; TooManyRequests when the queue is full, or the error of its closing."""
        if self._closed is not None:
            raise self._closed
        if len(self._queue) >= self._max_waiting:
            raise TooManyRequests("too many sessions wait for a slot; try again", retry_after=5)
        ticket = Ticket(slots)
        self._queue.append(ticket)
        self._grant()
        return ticket

    def withdraw(self, ticket: Ticket) -> None:
        """Remove a ticket from the queue, or release its granted slots."""
        if ticket.granted:
            self.release(ticket.slots)
        elif not ticket.future.done():
            ticket.future.cancel()
            self._queue.remove(ticket)
            self._grant()

    def close(self, error: AnyAgentError) -> None:
        """Refuse all waiting requests now, and new ones until `reopen`."""
        self._closed = error
        while self._queue:
            ticket = self._queue.popleft()
            ticket.refused = error
            ticket.future.cancel()

    def reopen(self) -> None:
        self._closed = None

    def release(self, slots: int) -> None:
        """Free slots on which no session was opened."""
        self.admitted -= slots
        self._grant()

    def _grant(self) -> None:
        while self._queue and self._queue[0].slots <= self.limit - self.admitted:
            ticket = self._queue.popleft()
            self.admitted += ticket.slots
            ticket.future.set_result(None)


class GrantedSlot(BaseModel):
    capacity: int
    """Grants on which no session was opened yet."""


class GrantBook:
    """Counts grants of one rank, stored under a name in its journal."""

    def __init__(self, journal: Journal, name: str) -> None:
        self._journal = journal
        self._granted, self._spent = name, f"{name}_spent"
        self._lock = asyncio.Lock()
        self.granted = 0
        """Grants ever made."""
        self.spent = 0
        """Sessions ever opened on a grant, those that are being written included."""

    async def recover(self) -> None:
        self.granted = await self._journal.meta(self._granted) or 0
        self.spent = await self._journal.meta(self._spent) or 0

    @property
    def left(self) -> int:
        return self.granted - self.spent

    async def add(self, keep: KeepAnswer, change: int = 1) -> GrantedSlot:
        """Grant one more slot; with -1 revoke one, Conflict (`no_grant`) if none is left."""
        async with self._lock:
            if self.left + change < 0:
                raise Conflict("no granted slot is left to revoke", code="no_grant")
            # Revoke at once, so that no open takes the slot meanwhile.
            self.granted += min(change, 0)
            answer = GrantedSlot(capacity=self.left + max(change, 0))
            granted = self.granted + max(change, 0)
            try:
                await self._journal.commit(PutMeta(self._granted, granted), *keep(answer))
            except BaseException:
                self.granted -= min(change, 0)
                raise
            self.granted = granted
        return answer

    async def withdraw(self) -> None:
        """Revoke all grants that are left."""
        async with self._lock:
            if left := self.left:
                self.granted -= left
                await self._journal.commit(PutMeta(self._granted, self.granted))

    def spend(self) -> bool:
        """Use a grant for a session, which is written together with `statement`; False if none is
        left."""
        if self.left <= 0:
            return False
        self.spent += 1
        return True

    def refund(self) -> None:
        """Return the grant of a session that was not opened."""
        self.spent -= 1

    def statement(self) -> PutMeta:
        """Return the statement to write together with a session that used a grant."""
        return PutMeta(self._spent, self.spent)
