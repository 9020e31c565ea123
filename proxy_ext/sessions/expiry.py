"""Expiry: ttl and idle time of open sessions, deadlines of awaited rewards and of groups."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

from any_agent.errors import AnyAgentError, SessionClosed, Unprocessable
from any_agent.types import SessionState
from proxy_ext.sessions.endings import UNRECEIVED, SessionEnder, is_rewarded
from proxy_ext.sessions.grading import GraderFailed, graded_session, grader_of
from proxy_ext.sessions.groups import Group
from proxy_ext.sessions.session import RecordedSession
from proxy_ext.sessions.session_store import SessionStore
from proxy_ext.sessions.state_machine import Event

log = logging.getLogger(__name__)

LateOutcome: TypeAlias = Literal["rewarded", "rejected", "zero", "graded", "grader_failed"]
NO_REWARD = "no reward came by its deadline"
UNGRADED = "the grader gave it no reward"
TOO_SMALL = "group_too_small"
"""The reason of sessions rejected because their group had too few of them."""
_GRADED_AT_ONCE = 1e-3  # seconds that an ended implicit session awaits rewards
BATCH = 256  # sessions that are ended together: they share the store's commits


@contextmanager
def _retried_later(sessions: SessionStore, session: RecordedSession) -> Iterator[None]:
    """Schedule another check of a session that could not be ended, unless it has ended."""
    try:
        yield
    except SessionClosed:
        log.debug("session %s has ended otherwise", session.id)
    except AnyAgentError as error:
        log.warning(
            "session %s could not be ended, which will be tried again: %s",
            session.id,
            error.message,
        )
        sessions.watch(session)
    except Exception:
        # The other sessions are still ended, and this one is tried again.
        log.exception("session %s could not be ended, which will be tried again", session.id)
        sessions.watch(session)


class SessionExpirer:
    """Ends sessions that were open, or awaited their reward, for too long.

    `sessions.late_reward` decides on sessions whose awaited reward did not come. The reason of each
    of them, or the author of its reward, shows what happened.
    """

    def __init__(self, sessions: SessionStore, endings: SessionEnder) -> None:
        self._sessions = sessions
        self._endings = endings
        self._policy = sessions.config.late_reward
        self._grader = grader_of(sessions.config)
        self._grading: dict[str, asyncio.Task[None]] = {}
        self.outcomes: Counter[str] = Counter()
        """Number of sessions by their outcome at the deadline of their reward."""
        self.implicit_ended = 0
        """Number of implicit sessions that ended because they were idle or reached their ttl."""

    async def sweep(self) -> None:
        """End every session whose time is over, without a scan of the others."""
        due = self._sessions.deadlines.pop(time.monotonic())
        for k in range(0, len(due), BATCH):
            found = (self._sessions.live.get(id) for id in due[k : k + BATCH])
            await asyncio.gather(*(self._check(s) for s in found if s is not None))

    async def end(self, session: RecordedSession, reason: str) -> None:
        """Expire an open session, unless it has just ended otherwise."""
        with _retried_later(self._sessions, session):
            await self._endings.expire(session, reason)
            log.info("session %s expired: %s", session.id, reason)

    async def _check(self, session: RecordedSession) -> None:
        now = time.monotonic()
        with _retried_later(self._sessions, session):
            if session.state is SessionState.AWAITING_REWARD:
                await self._check_awaiting(session, now)
            elif session.state is SessionState.OPEN:
                if session.expires <= now:
                    await self._end_open(session, "its ttl ran out")
                elif session.idle_expires <= now:
                    idle = f"idle for {session.idle_timeout:g} s: no call, no reward, no heartbeat"
                    await self._end_open(session, idle)
                else:
                    # The idle time was renewed since the check was scheduled.
                    self._sessions.watch(session)

    async def _end_open(self, session: RecordedSession, reason: str) -> None:
        if not session.row.implicit:
            await self.end(session, reason)
            return
        # Agents of implicit sessions do not finalize: idle time or ttl end the session.
        with self._sessions.conversations.ending(session):
            try:
                await self._endings.await_reward(session, _GRADED_AT_ONCE, by="")
            except Unprocessable:
                await self.end(session, f"{reason}, and no call was answered")
                return
        self.implicit_ended += 1
        await self._check_awaiting(session, time.monotonic() + _GRADED_AT_ONCE)

    async def _check_awaiting(self, session: RecordedSession, now: float) -> None:
        """End a session at the deadline of its reward; SessionClosed if it has ended otherwise."""
        if session.reward_due > now:
            self._sessions.watch(session)
            return
        await self._sessions.load(session)
        graded = self._grader is not None and (
            self._policy == "grade" or session.row.implicit or session.row.rewarded_by == "operator"
        )
        if graded and not is_rewarded(session):
            self._start_grading(session)
        elif self._policy == "zero":
            await self._settle(session, "zero", final={None: 0.0}, by="sessions.late_reward=zero")
        else:
            await self._settle(session, "rejected", reason=NO_REWARD)

    async def close_groups(self) -> None:
        """Close the groups whose time is over, and reject the sessions of those that are too small.

        After a failure of the store the next call tries again.
        """
        now = time.monotonic()
        for group in self._sessions.groups.all():
            try:
                if group.started and group.deadline <= now:
                    await self._close_group(group)
                if group.too_small:
                    await self._reject_group(group)
            except AnyAgentError as error:
                log.warning("could not close group %s yet: %s", group.id, error.message)

    async def _close_group(self, group: Group) -> None:
        """Let no member join any more, and expire the open ones.

        A member that awaits its reward has its own deadline, and the group waits for it.
        """
        if not group.expired:
            free = group.room
            group.expired = True
            # Released after the group is closed, so that no open admitted by this can join it.
            self._sessions.admission.release(free)
            await self._sessions.group_changed(group)
        open_ids = [id for id, state in group.members.items() if state is SessionState.OPEN]
        found = (self._sessions.live.get(id) for id in open_ids)
        await asyncio.gather(
            *(self.end(s, "its group's time ran out") for s in found if s is not None)
        )

    async def _reject_group(self, group: Group) -> None:
        members = [self._sessions.live[id] for id in group.finalized]
        size = len(members)
        reasons = dict.fromkeys((session.id for session in members), TOO_SMALL)
        await self._sessions.move(members, Event.DISCARD, reasons=reasons)
        self._sessions.groups.too_small += 1
        log.warning(
            "group %s closed with %d finalized of %d sessions, and needs %d: rejected as %s",
            *(group.id, size, group.size, group.min_size, TOO_SMALL),
        )

    @property
    def grading(self) -> int:
        """Number of sessions that are being graded or wait for it."""
        return len(self._grading)

    def _start_grading(self, session: RecordedSession) -> None:
        if session.id not in self._grading:
            task = asyncio.create_task(self._grade(session))
            self._grading[session.id] = task
            task.add_done_callback(lambda _: self._grading.pop(session.id, None))

    async def close(self) -> None:
        """Stop grading; sessions without a grade are graded after the next start."""
        for task in self._grading.values():
            task.cancel()
        if self._grading:
            await asyncio.wait(self._grading.values(), timeout=10)
        if self._grader is not None:
            await self._grader.close()

    async def _grade(self, session: RecordedSession) -> None:
        assert self._grader is not None, "sessions are graded only if there is a grader"
        with _retried_later(self._sessions, session):
            try:
                async with self._grader.free:
                    content = await graded_session(self._sessions, session)
                    final, calls = await self._grader.grade(content)
                if final or calls:
                    by = f"grader {self._grader.name}"
                    await self._settle(session, "graded", final=final, calls=calls, by=by)
                else:
                    await self._settle(session, "rejected", reason=UNGRADED)
            except (GraderFailed, Unprocessable) as error:
                # Unprocessable: also for names that have no weight.
                log.warning("session %s could not be graded: %s", session.id, error)
                await self._settle(session, "grader_failed", reason=f"grader failed: {error}")

    async def _settle(self, session: RecordedSession, outcome: LateOutcome, **ending: Any) -> None:
        """End the session; a reward that came in the meantime takes precedence."""
        if await self._endings.at_deadline(session, **ending):
            outcome = "rewarded"
        elif session.row.reason == UNRECEIVED:
            outcome = "rejected"
        self.outcomes[outcome] += 1
        log.info("session %s reached the deadline of its reward: %s", session.id, outcome)
