"""Slots for train sessions that were granted one by one, beside those that the trainer admits.

Who grants one wants a session of its own for it, without a group, and trains on it elsewhere: only
exports get it, and it opens also where no training goes on. Both counts are kept for good, so that
as many sessions are opened on grants as there were grants, over restarts too. The run's own trainer
has grants of its own: nobody else may take what it did not come to use.
"""

from __future__ import annotations

import asyncio

from pydantic import BaseModel

from any_agent.errors import Conflict
from proxy_ext.journal import Journal, PutMeta
from proxy_ext.journal.statements import KeepAnswer


class GrantedSlot(BaseModel):
    capacity: int
    """Grants that no session was opened on yet."""


class GrantBook:
    """The grants of one rank that are kept under a name in its journal."""

    def __init__(self, journal: Journal, name: str) -> None:
        self._journal = journal
        self._granted, self._spent = name, f"{name}_spent"
        self._lock = asyncio.Lock()
        self.granted = 0
        """Ever."""
        self.spent = 0
        """Sessions opened on one, ever; those that are being written are counted in."""

    async def recover(self) -> None:
        self.granted = await self._journal.meta(self._granted) or 0
        self.spent = await self._journal.meta(self._spent) or 0

    @property
    def left(self) -> int:
        return self.granted - self.spent

    async def add(self, keep: KeepAnswer, change: int = 1) -> GrantedSlot:
        """Grant one more; with -1 one less, Conflict (`no_grant`) if none is left."""
        async with self._lock:
            if self.left + change < 0:
                raise Conflict("no granted slot is left here", code="no_grant")
            # At once: what is taken away, no open may take meanwhile.
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
        """Nobody opens a session on those that are left."""
        async with self._lock:
            if left := self.left:
                self.granted -= left
                await self._journal.commit(PutMeta(self._granted, self.granted))

    def take(self) -> bool:
        """Use one for a session whose row is written next, with `row` beside it; False if there
        is none."""
        if self.left <= 0:
            return False
        self.spent += 1
        return True

    def put_back(self) -> None:
        """The session was not opened."""
        self.spent -= 1

    def row(self) -> PutMeta:
        """What is written together with a session that took one."""
        return PutMeta(self._spent, self.spent)
