"""Slots for train sessions: a cap on sessions ever admitted, and a fair, bounded queue.

The cap is absolute (`limit` sessions ever), so a repeated or lost capacity message changes nothing.
Slots are taken in the order of asking; a group asks for all of its members at once.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from itertools import islice

from any_agent.errors import AnyAgentError, TooManyRequests

_SHOWN = 64
"""Places of the queue that the trainer is told of."""
_RECALL = 3.0
"""Seconds within which a refused client asks again: those of its 429, and some."""


class Ticket:
    """A place in the queue; ``granted`` once its slots are its own."""

    __slots__ = ("future", "refused", "slots")

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.refused: AnyAgentError | None = None
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def granted(self) -> bool:
        return self.future.done() and not self.future.cancelled()

    async def wait(self, seconds: float) -> bool:
        """Whether the slots were granted within the time; raises what they were refused with."""
        if not self.future.done() and seconds > 0:
            await asyncio.wait([self.future], timeout=seconds)
        if self.refused is not None:
            raise self.refused
        return self.granted


class Admission:
    """Counts of one rank. ``admitted`` includes slots reserved for members not open yet."""

    def __init__(self, *, admitted: int = 0, max_waiting: int) -> None:
        self.admitted = admitted
        self._limit = 0
        self._lapses: float | None = None
        """None: nobody has set the cap yet."""
        self._max_waiting = max_waiting
        self._queue: deque[Ticket] = deque()
        self._refused: dict[str, tuple[int, float]] = {}
        self._closed: AnyAgentError | None = None

    @property
    def limit(self) -> int:
        """The cap in force; nothing more is admitted once its setter has gone silent."""
        return self.admitted if self._lapsed else self._limit

    @property
    def _lapsed(self) -> bool:
        return self._lapses is None or time.monotonic() >= self._lapses

    @property
    def why_none(self) -> str:
        """Why no slot is free, if none is."""
        if self._lapses is None:
            return "no trainer has said yet how many it wants (it is starting, or none runs)"
        if self._lapsed:
            return "the trainer has not been heard of for a while (it restarts, or is gone)"
        return "the trainer has as many as it wants now"

    @property
    def waiting(self) -> int:
        """Slots that opens wait for."""
        return sum(ticket.slots for ticket in self._queue)

    @property
    def queue(self) -> list[int]:
        """The slots that are asked for: by opens that wait, then by those lately refused."""
        now = time.monotonic()
        self._refused = {key: ask for key, ask in self._refused.items() if ask[1] > now}
        waiting = [ticket.slots for ticket in islice(self._queue, _SHOWN)]
        return [*waiting, *(slots for slots, _ in self._refused.values())]

    def remember(self, key: str, slots: int) -> None:
        """Somebody who did not wait was refused.

        Nobody would know of it otherwise: where free slots are shared with other ranks, there
        might never be enough of them here at the moment of asking.
        """
        if len(self._refused) < _SHOWN or key in self._refused:
            self._refused[key] = (slots, time.monotonic() + _RECALL)

    def forget(self, key: str) -> None:
        """It was served now."""
        self._refused.pop(key, None)

    def set_limit(self, limit: int, ttl: float) -> None:
        """Set the cap for ``ttl`` seconds."""
        self._limit = limit
        self._lapses = time.monotonic() + ttl
        self._grant()

    def ask(self, slots: int) -> Ticket:
        """Queue for slots; TooManyRequests when the queue is full, or why it is closed."""
        if self._closed is not None:
            raise self._closed
        if len(self._queue) >= self._max_waiting:
            raise TooManyRequests("too many sessions wait for a slot", retry_after=5)
        ticket = Ticket(slots)
        self._queue.append(ticket)
        self._grant()
        return ticket

    def withdraw(self, ticket: Ticket) -> None:
        """Leave the queue, or give granted slots back."""
        if ticket.granted:
            self.release(ticket.slots)
        elif not ticket.future.done():
            ticket.future.cancel()
            self._queue.remove(ticket)
            self._grant()

    def close(self, error: AnyAgentError) -> None:
        """Refuse whoever waits, at once, and whoever asks until `reopen`."""
        self._closed = error
        while self._queue:
            ticket = self._queue.popleft()
            ticket.refused = error
            ticket.future.cancel()

    def reopen(self) -> None:
        self._closed = None

    def release(self, slots: int) -> None:
        """Give back slots that no session was opened on."""
        self.admitted -= slots
        self._grant()

    def _grant(self) -> None:
        while self._queue and self._queue[0].slots <= self.limit - self.admitted:
            ticket = self._queue.popleft()
            self.admitted += ticket.slots
            ticket.future.set_result(None)
