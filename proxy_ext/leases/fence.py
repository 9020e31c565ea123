"""Keeps a trainer out that another one has taken over from.

Each start of the trainer has a number (`trainer.epoch` in the run's folder). The highest that a
rank has heard of is in its journal; whoever comes with a lower one can neither lease nor publish,
however long it was gone, also after the rank's restart. A request without a number is a person's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from any_agent.auth.access import RUN
from any_agent.errors import Conflict, SessionClosed, StaleOwner
from any_agent.types import SessionState
from proxy_ext.journal import Journal, PutMeta
from proxy_ext.journal.rows import GRANT_OWNER
from proxy_ext.sessions.endings import SessionEnder
from proxy_ext.sessions.session_store import SessionStore

_META = "trainer_epoch"


class Fence:
    """The highest start of the trainer that this rank has heard of."""

    def __init__(
        self, journal: Journal, taken_over: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """``taken_over`` is called once for each later start, before anything is done for it."""
        self._journal = journal
        self._taken_over = taken_over
        self._lock = asyncio.Lock()
        self.epoch = 0

    async def recover(self) -> None:
        """Load what the journal holds."""
        self.epoch = await self._journal.meta(_META) or 0

    async def enter(self, epoch: int | None) -> None:
        """A request of this start; StaleOwner if it is not the last one.

        A later one is durable before anything is done for it.
        """
        if epoch is not None and epoch > self.epoch:
            async with self._lock:
                if epoch > self.epoch:
                    if self._taken_over is not None:
                        await self._taken_over()
                    await self._journal.commit(PutMeta(_META, epoch))
                    self.epoch = epoch
        self.check(epoch)

    def check(self, epoch: int | None) -> None:
        """StaleOwner if another one took over since."""
        if epoch is not None and epoch < self.epoch:
            raise StaleOwner(
                f"start {self.epoch} of the trainer has taken over from start {epoch}, which must "
                "end; if that cannot be, write the higher number into the run's trainer.epoch"
            )


log = logging.getLogger(__name__)

_WHY = "its trainer ended before it had it"


async def drop_leftovers(sessions: SessionStore, endings: SessionEnder) -> None:
    """Withdraw the grants that the run's trainer has not used, and end the sessions that it opened
    on others: those that run are aborted, and those that have ended rejected."""
    await sessions.run_grants.withdraw()
    left = [
        session
        for session in sessions.live.values()
        if session.row.owner == GRANT_OWNER and session.row.opened_by == RUN.name
    ]
    for session in left:
        try:
            if session.state is SessionState.FINALIZED:
                await endings.veto(session, _WHY)
            else:
                await endings.abort(session, _WHY)
        except (Conflict, SessionClosed):
            # It ended meanwhile.
            continue
    if left:
        log.info("%d sessions of an earlier start of the trainer were ended", len(left))
