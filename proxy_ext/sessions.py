"""The live sessions of one rank: found, rewarded, finalized, aborted, expired.

Each change is checked, written to the journal, then made in memory, under the session's lock.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import replace

from any_agent.config import SessionConfig
from any_agent.errors import (
    AnyAgentError,
    Conflict,
    NotFound,
    SessionClosed,
    Unprocessable,
)
from any_agent.protocol import SessionInfo
from any_agent.types import TERMINAL_STATES, Interaction, SessionMode, SessionState
from proxy_ext.admission import Admission
from proxy_ext.counts import SessionCounts
from proxy_ext.groups import Group, Groups
from proxy_ext.journal import (
    Journal,
    PutInteraction,
    SessionRow,
    SetFinal,
    SetReward,
    SetState,
)
from proxy_ext.names import Names
from proxy_ext.session import (
    EXPORT_OWNER,
    HANDED_OUT_STATES,
    LIVE_STATES,
    TRANSITIONS,
    Session,
    Transitions,
    add_to_tree,
)

log = logging.getLogger(__name__)


UNDELIVERED = "undelivered"


def _undelivered(interaction: Interaction) -> Interaction:
    return replace(interaction, untrainable_reason=UNDELIVERED)


class Sessions:
    """The sessions of a rank, backed by its journal."""

    def __init__(
        self,
        journal: Journal,
        config: SessionConfig,
        names: Names,
        *,
        rank: int,
    ) -> None:
        self.journal = journal
        self.config = config
        self.names = names
        self.rank = rank
        self.admission = Admission(max_waiting=config.max_waiting)
        self.groups = Groups(names, timeout=config.group_timeout)
        self.counts = SessionCounts()
        self.undelivered = 0
        """Answers taken out of training because they reached nobody."""
        self.live: dict[str, Session] = {}
        self._lanes: dict[str, str] = {}
        self.ready = asyncio.Condition()
        """Notified whenever a group may have closed."""

    # -- start ---------------------------------------------------------------------------------

    async def recover(self, *, lease_ttl: float) -> None:
        """Take over what the journal holds: open sessions go on, finalized ones wait."""
        now, wall = time.monotonic(), time.time()
        for row in await self.journal.sessions(LIVE_STATES):
            # The wall clock may have been set back meanwhile.
            remaining = min(row.expires_at - wall, row.expires_at - row.created_at)
            session = Session(row, expires=now + remaining)
            session.lease_expires = now + lease_ttl
            for stored in await self.journal.interactions(row.id):
                add_to_tree(session.tree, stored)
            self.live[row.id] = session
            newest = await self.journal.session_of_lane(row.lane)
            if newest is not None and newest.id == row.id:
                self._lanes[row.lane] = row.id
        for group_id in dict.fromkeys(s.row.group_id for s in self.live.values()):
            if group_id is not None:
                self.groups.add(self._recovered(await self.journal.group(group_id), wall))
        self.counts.recover(await self.journal.counts())
        self.admission.admitted = self.counts.created[SessionMode.TRAIN] + self.groups.reserved
        if self.live:
            log.info("recovered %d sessions from the journal", len(self.live))

    def _recovered(self, rows: list[SessionRow], wall: float) -> Group:
        """A group of these members."""
        first = rows[0]
        named = first.group_id or ""
        task = f"task:{first.task_id}"
        key = task if "~" in named else f"group:{named}"
        timeout = self.config.group_timeout
        remaining = min(first.created_at + timeout - wall, timeout)
        group = Group(named, key, first.group_size, time.monotonic() + remaining)
        group.members = {row.id: row.state for row in rows}
        # An export leases single sessions, also of groups that are still open.
        handed_out = any(
            row.state in HANDED_OUT_STATES and row.owner != EXPORT_OWNER for row in rows
        )
        if handed_out or (remaining <= 0 and not group.has_open):
            # It had closed before with the members that it had.
            group.size = len(group.members)
            group.closed = True
        group.closed = group.closed or group.complete
        return group

    async def revive(self, sessions: Iterable[Session]) -> None:
        """Put ended sessions that are leased again back among the live ones, with their groups."""
        for session in sessions:
            group_id = session.row.group_id
            if group_id is not None and self.groups.get(group_id) is None:
                rows = await self.journal.group(group_id)
                self.groups.restore(self._recovered(rows, time.time()))
            self.live[session.id] = session

    def add(self, session: Session) -> None:
        """A new session that the journal has; its lane's newest one."""
        self.counts.add(session.row)
        self.live[session.id] = session
        self._lanes[session.row.lane] = session.id

    # -- look-up -------------------------------------------------------------------------------

    async def by_lane(self, lane: str) -> Session | None:
        """The lane's newest session; ended ones are read from the journal, without a tree."""
        session_id = self._lanes.get(lane)
        if session_id is not None:
            return self.live[session_id]
        row = await self.journal.session_of_lane(lane)
        return None if row is None else self._stored(row)

    async def by_id(self, session_id: str) -> Session:
        """A session by its id; NotFound."""
        session = self.live.get(session_id)
        if session is not None:
            return session
        row = await self.journal.session(session_id)
        if row is None:
            raise NotFound(f"there is no session {session_id[:80]!r}", code="session_not_found")
        return self._stored(row)

    def _stored(self, row: SessionRow) -> Session:
        """An ended session; or the live one, if it was opened while its row was being read."""
        return self.live.get(row.id) or Session(row, expires=0.0)

    async def load(self, session: Session) -> None:
        """Read an ended session's interactions from the journal, if it has none yet."""
        if session.id not in self.live and not len(session.tree):
            for stored in await self.journal.interactions(session.id):
                add_to_tree(session.tree, stored)

    async def info(self, session: Session) -> SessionInfo:
        """What is recorded of a session."""
        await self.load(session)
        return session.info()

    # -- record --------------------------------------------------------------------------------

    async def record(self, session: Session, interaction: Interaction, key: bytes) -> None:
        """Make an interaction durable, then visible."""
        await self.journal.commit(PutInteraction(interaction, key))
        session.tree.add(interaction, key)

    async def mark_undelivered(self, session: Session, interaction: Interaction) -> None:
        """Take an interaction out of training whose answer reached nobody."""
        async with session.lock:
            if session.state is SessionState.OPEN and interaction.trainable:
                await self.journal.commit(PutInteraction(_undelivered(interaction)))
                interaction.untrainable_reason = UNDELIVERED
                self.undelivered += 1

    async def set_reward(self, session: Session, reward: float, wanted: str | None) -> str:
        """Reward one interaction (the last one by default); its id."""
        async with session.lock:
            session.require_open()
            tree = session.tree
            if wanted is not None and wanted not in tree:
                raise NotFound(
                    f"session {session.id} has no completion {wanted[:80]!r}",
                    code="completion_not_found",
                )
            if len(tree) == 0:
                raise Unprocessable(
                    "the session has no completion to reward yet", code="no_interactions"
                )
            interaction = tree[wanted] if wanted is not None else tree.last()
            await self.journal.commit(
                SetReward(
                    session.id,
                    interaction.id,
                    name=None,
                    value=reward,
                    by="session",
                    at=time.time(),
                    combined=reward,
                )
            )
            interaction.reward = reward
            return str(interaction.id)

    async def finalize(self, session: Session, final_reward: float | None) -> None:
        """End a session: calls under way are aborted, then nothing more can be added."""
        async with session.lock:
            session.require_open()
            session.closing = True
            try:
                self._check_finalizable(session, final_reward)
                await self._settle_calls(session)
                train = session.mode is SessionMode.TRAIN
                state = SessionState.FINALIZED if train else SessionState.EVALUATED
                row = replace(session.row, state=state, final_reward=final_reward)
                # Answers that are still being sent: this session does not wait for their clients.
                unsent = [
                    call.completion.interaction
                    for call in session.calls
                    if call.completion is not None and not call.delivered
                ]
                await self.journal.commit(
                    SetFinal(session.id, state, final_reward),
                    *(PutInteraction(_undelivered(i)) for i in unsent),
                )
            finally:
                session.closing = False
            for interaction in unsent:
                interaction.untrainable_reason = UNDELIVERED
            self.undelivered += len(unsent)
            self._set_row(session, row)
            await self._changed([session])

    def _check_finalizable(self, session: Session, final_reward: float | None) -> None:
        if session.mode is not SessionMode.TRAIN:
            return
        if len(session.tree) == 0:
            raise Unprocessable(
                "the session has no model call, so there is nothing to train on; abort it instead",
                code="no_interactions",
            )
        rewarded = final_reward is not None or any(i.reward is not None for i in session.tree)
        if self.config.require_reward and not rewarded:
            raise Unprocessable(
                "the trajectory has no reward: pass final_reward or call set_reward first "
                "(sessions.require_reward=false takes it as 0)",
                code="no_reward",
            )

    async def end(self, session: Session, state: SessionState, reason: str) -> None:
        """Abort or expire an open session."""
        async with session.lock:
            session.require_open()
            session.closing = True
            try:
                await self._settle_calls(session)
                await self.journal.commit(SetState((session.id,), state, reason))
            finally:
                session.closing = False
            self._set_row(session, replace(session.row, state=state, reason=reason))
            await self._changed([session])

    async def _settle_calls(self, session: Session) -> None:
        """Abort calls under way; those whose recording has begun are let through."""
        for call in tuple(session.calls):
            call.abort("the session was ended while the call was under way")
        tasks = [call.task for call in session.calls if call.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=30)

    async def set_states(
        self,
        sessions: Iterable[Session],
        state: SessionState,
        *,
        reasons: dict[str, str] | None = None,
        owner: str | None = None,
        transitions: Transitions = TRANSITIONS,
    ) -> None:
        """Move sessions at once; one write."""
        chosen = sorted(sessions, key=lambda session: session.id)
        reasons = reasons or {}
        async with AsyncExitStack() as locks:
            # In the order of their ids, so that two callers cannot wait for each other.
            for session in chosen:
                await locks.enter_async_context(session.lock)
            by_reason: dict[str | None, list[str]] = {}
            for session in chosen:
                if state not in transitions.get(session.state, ()):
                    raise Conflict(f"session {session.id} is {session.state}; it cannot be {state}")
                by_reason.setdefault(reasons.get(session.id), []).append(session.id)
            await self.journal.commit(
                *(SetState(tuple(ids), state, why, owner) for why, ids in by_reason.items())
            )
            for session in chosen:
                reason = reasons.get(session.id)
                row = replace(session.row, state=state, owner=owner, reason=reason)
                self._set_row(session, row)
        await self._changed(chosen)

    def _set_row(self, session: Session, row: SessionRow) -> None:
        """What the journal has of it now."""
        self.counts.move(session.row, row)
        session.row = row

    async def _changed(self, sessions: Iterable[Session]) -> None:
        """Bring groups and look-up tables in line with new states; wake long polls."""
        for session in sessions:
            group = self.groups.get(session.row.group_id) if session.row.group_id else None
            if group is not None:
                group.members[session.id] = session.state
                group.closed = group.closed or group.complete
                if group.done:
                    self.groups.discard(group)
            if session.state in TERMINAL_STATES:
                self.live.pop(session.id, None)
                # The lane may have its next session already.
                if self._lanes.get(session.row.lane) == session.id:
                    del self._lanes[session.row.lane]
        async with self.ready:
            self.ready.notify_all()

    # -- time ----------------------------------------------------------------------------------

    async def expire(self) -> None:
        """End sessions and close groups whose time is over."""
        now = time.monotonic()
        for session in [
            s for s in self.live.values() if s.state is SessionState.OPEN and s.expires <= now
        ]:
            await self._expire_one(session, "its ttl ran out")
        for group in self.groups.all():
            if group.closed or group.deadline > now or not group.members:
                continue
            for session_id, state in tuple(group.members.items()):
                member = self.live.get(session_id)
                if state is SessionState.OPEN and member is not None:
                    await self._expire_one(member, "its group's time ran out")
            if not group.promised and not group.closed and not group.has_open:
                self.admission.release(group.room)
                group.size -= group.room
                group.closed = True
                if group.done:
                    self.groups.discard(group)
                async with self.ready:
                    self.ready.notify_all()

    async def _expire_one(self, session: Session, reason: str) -> None:
        try:
            await self.end(session, SessionState.EXPIRED, reason)
            log.info("session %s expired: %s", session.id, reason)
        except SessionClosed:
            pass
        except AnyAgentError as error:
            log.warning("could not expire session %s: %s", session.id, error.message)
