"""The fence that keeps out a trainer after a later start of it has taken over.

Each start of the trainer has a number (`trainer.epoch` in the run's folder). A rank's journal has
the highest number that it has seen; a trainer with a lower one can neither lease nor publish,
however long it was away, also after the rank's restart. A person's requests have no number.
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
    """Checks requests against the latest start of the trainer that this rank has seen."""

    def __init__(
        self, journal: Journal, on_takeover: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """``on_takeover`` is called once for each later start, before it is served."""
        self._journal = journal
        self._on_takeover = on_takeover
        self._lock = asyncio.Lock()
        self.epoch = 0

    async def recover(self) -> None:
        """Load what the journal holds."""
        self.epoch = await self._journal.meta(_META) or 0

    async def admit(self, epoch: int | None) -> None:
        """Admit a request of this start; StaleOwner if it is not the latest one.

        The number of a later start is durable before its first request is served.
        """
        if epoch is not None and epoch > self.epoch:
            async with self._lock:
                if epoch > self.epoch:
                    if self._on_takeover is not None:
                        await self._on_takeover()
                    await self._journal.commit(PutMeta(_META, epoch))
                    self.epoch = epoch
        self.check(epoch)

    def check(self, epoch: int | None) -> None:
        """Raise StaleOwner if a later start has taken over."""
        if epoch is not None and epoch < self.epoch:
            raise StaleOwner(
                f"start {self.epoch} of the trainer has taken over from start {epoch}, which must "
                "end; if it is in fact the latest, raise the number in the run's trainer.epoch"
            )


log = logging.getLogger(__name__)

_UNCLAIMED = "its trainer ended before it had it"


async def drop_leftovers(sessions: SessionStore, endings: SessionEnder) -> None:
    """Revoke the unused grants of the run's trainer, and end the sessions that it opened on grants:
    open ones are aborted, finalized ones rejected.

    An earlier start that ran agents on a dataset left them; the next start repeats its items.
    """
    await sessions.run_grants.withdraw()
    left = [
        session
        for session in sessions.live.values()
        if session.row.owner == GRANT_OWNER and session.row.opened_by == RUN.name
    ]
    for session in left:
        try:
            if session.state is SessionState.FINALIZED:
                await endings.veto(session, _UNCLAIMED)
            else:
                await endings.abort(session, _UNCLAIMED)
        except (Conflict, SessionClosed):
            # The session ended meanwhile.
            continue
    if left:
        log.info("%d sessions of an earlier start of the trainer were ended", len(left))
