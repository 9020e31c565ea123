"""What a start of the run's trainer leaves behind that ran agents itself, on a dataset.

The next start runs those items again; nobody exports what came of them.
"""

from __future__ import annotations

import logging

from any_agent.auth.access import RUN
from any_agent.errors import Conflict, SessionClosed
from any_agent.types import SessionState
from proxy_ext.sessions.endings import SessionEnder
from proxy_ext.sessions.lease_owners import GRANT_OWNER
from proxy_ext.sessions.session_store import SessionStore

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
