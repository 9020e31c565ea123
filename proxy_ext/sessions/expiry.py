"""The end of sessions' time: ttl and idle time of open ones, the deadline of awaited rewards."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from typing import Any, Literal, TypeAlias

from any_agent.config import SessionConfig
from any_agent.errors import AnyAgentError, SessionClosed, Unprocessable
from any_agent.types import SessionState
from proxy_ext.sessions.endings import SessionEnder, is_rewarded
from proxy_ext.sessions.grading import Grader, GraderFailed, graded_session
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


LateOutcome: TypeAlias = Literal["rewarded", "rejected", "zero", "graded", "grader_failed"]
NO_REWARD = "no reward came by its deadline"


class LateRewardWaiter:
    """Ends the sessions of one rank that awaited a reward until their deadline."""

    def __init__(
        self,
        sessions: SessionStore,
        endings: SessionEnder,
        config: SessionConfig,
        grader: Grader | None,
    ) -> None:
        self._sessions = sessions
        self._endings = endings
        self._policy = config.late_reward
        self._grader = grader
        self._grading: dict[str, asyncio.Task[None]] = {}
        self.outcomes: Counter[str] = Counter()
        """What became of sessions at their deadline."""

    @property
    def grading(self) -> int:
        """Sessions that are being graded, or wait for it."""
        return len(self._grading)

    async def end(self, session: RecordedSession) -> None:
        """Its deadline has passed. SessionClosed if it has ended otherwise."""
        await self._sessions.load(session)
        graded = self._grader is not None and (self._policy == "grade" or session.row.implicit)
        if graded and not is_rewarded(session):
            self._begin_grading(session)
        elif self._policy == "zero":
            await self._end(session, "zero", final={None: 0.0}, by="sessions.late_reward=zero")
        else:
            await self._end(session, "rejected", reason=NO_REWARD)

    def _begin_grading(self, session: RecordedSession) -> None:
        if session.id not in self._grading:
            task = asyncio.create_task(self._grade(session))
            self._grading[session.id] = task
            task.add_done_callback(lambda _: self._grading.pop(session.id, None))

    async def close(self) -> None:
        """Stop grading; what is not graded yet is graded after the next start."""
        for task in self._grading.values():
            task.cancel()
        if self._grading:
            await asyncio.wait(self._grading.values(), timeout=10)
        if self._grader is not None:
            await self._grader.close()

    async def _grade(self, session: RecordedSession) -> None:
        try:
            await self._end_graded(session)
        except SessionClosed:
            log.debug("session %s ended while it was graded", session.id)
        except AnyAgentError as error:
            log.warning("could not end session %s yet: %s", session.id, error.message)
            # The next sweep grades it again.
            self._sessions.watch(session)
        except Exception:
            log.exception("could not end session %s yet", session.id)
            self._sessions.watch(session)

    async def _end_graded(self, session: RecordedSession) -> None:
        assert self._grader is not None, "the configuration asks for one"
        try:
            async with self._grader.free:
                await self._sessions.load(session)
                final = await self._grader.grade(graded_session(session))
            await self._end(session, "graded", final=final, by=f"grader {self._grader.name}")
        except (GraderFailed, Unprocessable) as error:
            # Also of names that have no weight.
            log.warning("session %s could not be graded: %s", session.id, error)
            await self._end(session, "grader_failed", reason=f"grader failed: {error}")

    async def _end(self, session: RecordedSession, outcome: LateOutcome, **ending: Any) -> None:
        """What came in the meantime counts for more."""
        if await self._endings.at_deadline(session, **ending):
            outcome = "rewarded"
        self.outcomes[outcome] += 1
        log.info("session %s has awaited its reward until its deadline: %s", session.id, outcome)
