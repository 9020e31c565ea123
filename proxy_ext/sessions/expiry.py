"""The end of sessions' time: ttl and idle time of open ones, the deadline of awaited rewards."""

from __future__ import annotations

import asyncio
import logging
import time

from any_agent.errors import AnyAgentError, SessionClosed, Unprocessable
from any_agent.types import SessionState
from proxy_ext.sessions.endings import SessionEnder
from proxy_ext.sessions.late_rewards import LateRewardWaiter
from proxy_ext.sessions.session import RecordedSession
from proxy_ext.sessions.session_store import SessionStore

log = logging.getLogger(__name__)

_NO_TIME = 1e-3
"""Seconds that a session awaits rewards which is graded at once."""
_AT_ONCE = 256
"""Sessions that are ended together: they share the store's commits."""


class SessionExpirer:
    """Ends what has been open, or has awaited its reward, for too long."""

    def __init__(
        self, sessions: SessionStore, endings: SessionEnder, late: LateRewardWaiter
    ) -> None:
        self._sessions = sessions
        self._endings = endings
        self._late = late
        self.implicit_ended = 0
        """Sessions that model calls opened, and that were over when none came any more, or at their
        ttl."""

    async def sweep(self) -> None:
        """End every session whose time is over; costs nothing for the others."""
        due = self._sessions.deadlines.pop(time.monotonic())
        for k in range(0, len(due), _AT_ONCE):
            found = (self._sessions.live.get(id) for id in due[k : k + _AT_ONCE])
            await asyncio.gather(*(self._look(s) for s in found if s is not None))

    async def end(self, session: RecordedSession, reason: str) -> None:
        """Expire an open session; one that has just ended otherwise is left so."""
        try:
            await self._endings.expire(session, reason)
            log.info("session %s expired: %s", session.id, reason)
        except SessionClosed:
            pass
        except AnyAgentError as error:
            log.warning("could not expire session %s yet: %s", session.id, error.message)
            self._sessions.watch(session)

    async def _look(self, session: RecordedSession) -> None:
        try:
            await self._end_if_due(session)
        except Exception:
            # The others must not stay for its sake, nor this one for ever.
            log.exception("could not end session %s yet", session.id)
            self._sessions.watch(session)

    async def _end_if_due(self, session: RecordedSession) -> None:
        now = time.monotonic()
        if session.state is SessionState.AWAITING_REWARD:
            await self._look_at_awaiting(session, now)
        elif session.state is SessionState.OPEN:
            if session.expires <= now:
                await self._end_open(session, "its ttl ran out")
            elif session.idle_expires <= now:
                idle = f"idle for {session.idle_timeout:g} s: no call, no reward, no heartbeat"
                await self._end_open(session, idle)
            else:
                # Something has happened since the time was set.
                self._sessions.watch(session)

    async def _end_open(self, session: RecordedSession, reason: str) -> None:
        if not session.row.implicit:
            await self.end(session, reason)
            return
        # Nobody says that its agent is done: it is when it has been still for so long, or has gone
        # on for as long as it may.
        with self._sessions.implicit.ending(session):
            try:
                await self._endings.await_reward(session, _NO_TIME, by="")
            except Unprocessable:
                await self.end(session, f"{reason}, and no call was answered")
                return
            except SessionClosed:
                return
            except AnyAgentError as error:
                log.warning("could not end session %s yet: %s", session.id, error.message)
                self._sessions.watch(session)
                return
        self.implicit_ended += 1
        await self._look_at_awaiting(session, time.monotonic() + _NO_TIME)

    async def _look_at_awaiting(self, session: RecordedSession, now: float) -> None:
        if session.reward_due > now:
            self._sessions.watch(session)
            return
        try:
            await self._late.end(session)
        except SessionClosed:
            pass
        except AnyAgentError as error:
            log.warning("could not end session %s yet: %s", session.id, error.message)
            self._sessions.watch(session)
