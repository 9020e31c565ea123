"""Slots for train sessions that were granted one by one, beside those that the trainer admits.

A granted slot is for one session without a group, which is trained on elsewhere: only exports get
it, and it opens also where no training goes on. Both counts are permanent, so that as many sessions
are opened on grants as there were grants, over restarts too. The run's own trainer has grants of
its own, which no other caller may use.
"""

from __future__ import annotations

import asyncio

from pydantic import BaseModel

from any_agent.errors import Conflict
from proxy_ext.journal import Journal, PutMeta
from proxy_ext.journal.statements import KeepAnswer


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
        """Use a grant for a session that is written next, together with `statement`; False if none
        is left."""
        if self.left <= 0:
            return False
        self.spent += 1
        return True

    def refund(self) -> None:
        """Return the grant of a session that was not opened."""
        self.spent -= 1

    def statement(self) -> PutMeta:
        """Return what is written together with a session that used a grant."""
        return PutMeta(self._spent, self.spent)
