"""The live sessions of one rank: opened, rewarded, finalized, aborted, expired.

Each change is checked, written to the journal, then made in memory, under the session's lock.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from any_agent.chat import chain_keys
from any_agent.config import SessionConfig
from any_agent.errors import (
    AnyAgentError,
    Conflict,
    InvalidRequest,
    NotFound,
    SessionClosed,
    TooManyRequests,
    Unauthenticated,
    Unprocessable,
)
from any_agent.keys import KeySigner, Lane
from any_agent.protocol import SessionInfo, StartSession
from any_agent.record import InteractionTree
from any_agent.types import TERMINAL_STATES, Interaction, SessionMode, SessionState
from proxy_ext.admission import Admission
from proxy_ext.groups import Group, Groups, closed_error
from proxy_ext.journal import (
    Journal,
    PutInteraction,
    PutSession,
    SessionRow,
    SetInteractionReward,
    SetState,
)

if TYPE_CHECKING:
    from proxy_ext.calls import Call

log = logging.getLogger(__name__)

LIVE_STATES = (SessionState.OPEN, SessionState.FINALIZED, SessionState.LEASED)
HANDED_OUT_STATES = (SessionState.LEASED, SessionState.TRAINED, SessionState.REJECTED)
"""What only members of a closed group get to."""
TRANSITIONS: dict[SessionState, frozenset[SessionState]] = {
    SessionState.OPEN: frozenset(
        {
            SessionState.FINALIZED,
            SessionState.EVALUATED,
            SessionState.EXPIRED,
            SessionState.ABORTED,
        }
    ),
    SessionState.FINALIZED: frozenset({SessionState.LEASED, SessionState.REJECTED}),
    SessionState.LEASED: frozenset(
        {SessionState.FINALIZED, SessionState.TRAINED, SessionState.REJECTED}
    ),
}
"""Every state change there is; terminal states have none."""


@dataclass(slots=True, eq=False)
class Session:
    """A session in memory, with its tree and the calls under way."""

    row: SessionRow
    expires: float
    """Monotonic."""
    tree: InteractionTree = field(default_factory=InteractionTree)
    calls: set[Call] = field(default_factory=set)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    lease_expires: float = 0.0
    closing: bool = False
    """It is being ended: new calls are refused and recordings of running ones are awaited."""

    @property
    def id(self) -> str:
        return self.row.id

    @property
    def mode(self) -> SessionMode:
        return SessionMode(self.row.mode)

    @property
    def state(self) -> SessionState:
        return self.row.state

    def require_open(self) -> None:
        """SessionClosed (410) unless it is open."""
        if self.state is not SessionState.OPEN or self.closing:
            raise closed_session(self.row)

    def info(self) -> SessionInfo:
        row = self.row
        return SessionInfo(
            session_id=row.id,
            state=row.state,
            mode="train" if row.mode == "train" else "eval",
            task_id=row.task_id,
            group_id=row.group_id,
            interactions=len(self.tree),
            rewards={i.id: i.reward for i in self.tree if i.reward is not None},
            final_reward=row.final_reward,
            reason=row.reason,
            created_at=row.created_at,
            expires_in=self.expires - time.monotonic() if row.state is SessionState.OPEN else None,
        )


def closed_session(row: SessionRow) -> SessionClosed:
    why = f" ({row.reason})" if row.reason else ""
    state = "being finalized" if row.state is SessionState.OPEN else f"{row.state}{why}"
    return SessionClosed(
        f"session {row.id} is {state}; it takes no more calls or rewards: start a new session",
        details={"state": str(row.state)},
    )


class Sessions:
    """The sessions of a rank, backed by its journal."""

    def __init__(
        self,
        journal: Journal,
        signer: KeySigner,
        config: SessionConfig,
        *,
        rank: int,
        batch_size: int,
    ) -> None:
        self.journal = journal
        self.signer = signer
        self.config = config
        self.rank = rank
        self._batch_size = batch_size
        self.admission = Admission(max_waiting=config.max_waiting)
        self.groups = Groups(timeout=config.group_timeout)
        self.live: dict[str, Session] = {}
        self._lanes: dict[str, str] = {}
        self._opening: set[str] = set()
        """Lanes whose session is being opened."""
        self.ready = asyncio.Condition()
        """Notified whenever a group may have closed."""

    # -- start ---------------------------------------------------------------------------------

    async def recover(self, *, lease_ttl: float) -> None:
        """Take over what the journal holds: open sessions go on, finalized ones wait."""
        now, wall = time.monotonic(), time.time()
        for row in await self.journal.sessions(LIVE_STATES):
            session = Session(row, expires=now + row.expires_at - wall)
            session.lease_expires = now + lease_ttl
            for interaction in await self.journal.interactions(row.id):
                add_to_tree(session.tree, interaction)
            self.live[row.id] = session
            newest = await self.journal.session_of_lane(row.lane)
            if newest is not None and newest.id == row.id:
                self._lanes[row.lane] = row.id
        for group_id in dict.fromkeys(s.row.group_id for s in self.live.values()):
            if group_id is not None:
                self._recover_group(await self.journal.group(group_id), wall)
        total = await self.journal.count(SessionMode.TRAIN)
        self.admission.admitted = total + self.groups.reserved
        if self.live:
            log.info("recovered %d sessions from the journal", len(self.live))

    def _recover_group(self, rows: list[SessionRow], wall: float) -> None:
        first = rows[0]
        named = first.group_id or ""
        task = f"task:{first.task_id}"
        key = task if "~" in named else f"group:{named}"
        remaining = first.created_at + self.config.group_timeout - wall
        group = Group(named, key, first.group_size, time.monotonic() + remaining)
        group.members = {row.id: row.state for row in rows}
        handed_out = any(state in HANDED_OUT_STATES for state in group.members.values())
        if handed_out or (remaining <= 0 and not group.has_open):
            # It had closed before with the members that it had.
            group.size = len(group.members)
            group.closed = True
        group.closed = group.closed or group.complete
        self.groups.add(group)

    # -- open ----------------------------------------------------------------------------------

    async def open(self, body: StartSession) -> tuple[Session, str]:
        """Open a session: take a slot (train), write it, answer it with its key."""
        lane, key = await self._lane(body.api_key)
        self._opening.add(lane.id)
        try:
            return await self._open(body, lane, key)
        finally:
            self._opening.discard(lane.id)

    async def _open(self, body: StartSession, lane: Lane, key: str) -> tuple[Session, str]:
        mode = SessionMode(body.mode)
        group: Group | None = None
        if mode is SessionMode.TRAIN:
            group = await self._admit(body)
        now, wall = time.monotonic(), time.time()
        ttl = min(body.ttl or self.config.ttl, self.config.ttl)
        row = SessionRow(
            id=f"ses-{self.rank}-{secrets.token_hex(8)}",
            lane=lane.id,
            mode=mode,
            state=SessionState.OPEN,
            task_id=body.task_id,
            group_id=group.id if group else None,
            group_size=group.size if group else 1,
            metadata=body.metadata,
            created_at=wall,
            expires_at=wall + ttl,
        )
        session = Session(row, expires=now + ttl)
        # Shielded: a client that leaves now must not leave a row that memory lacks.
        insert = asyncio.ensure_future(self._insert(session, group))
        try:
            await asyncio.shield(insert)
        except asyncio.CancelledError:
            await asyncio.wait([insert])
            if insert.exception() is None:
                await self.end(session, SessionState.ABORTED, "its opener left")
            raise
        return session, key

    async def _insert(self, session: Session, group: Group | None) -> None:
        try:
            await self.journal.commit(PutSession(session.row))
        except BaseException:
            if group is not None:
                group.promised -= 1
                self._discard_unused(group)
            elif session.mode is SessionMode.TRAIN:
                self.admission.release(1)
            raise
        self.live[session.id] = session
        self._lanes[session.row.lane] = session.id
        if group is not None:
            group.promised -= 1
            if not group.members:
                # Its time begins now; until here it may have waited for its slots.
                group.deadline = time.monotonic() + self.config.group_timeout
            group.members[session.id] = SessionState.OPEN

    async def _lane(self, api_key: str | None) -> tuple[Lane, str]:
        if api_key is None:
            return self.signer.mint(self.rank)
        lane = self.signer.verify(api_key)
        if lane is None:
            raise Unauthenticated("api_key is not a session key of this service")
        if lane.rank != self.rank:
            raise Conflict(
                "the key belongs to another rank; open without api_key", code="lane_on_other_rank"
            )
        current = await self.by_lane(lane.id)
        if current is not None and current.state is SessionState.OPEN:
            raise Conflict(
                f"the key's session {current.id} is still open; finalize it first",
                code="lane_busy",
            )
        if lane.id in self._opening:
            raise Conflict("another open with this key is under way", code="lane_busy")
        return lane, api_key

    async def _admit(self, body: StartSession) -> Group | None:
        """A slot of its own, or one of its group's; TooManyRequests if none came in time."""
        wait = min(body.wait, self.config.max_wait)
        if body.group_id is None and body.task_id is None:
            if body.group_size not in (None, 1):
                raise InvalidRequest("group_size needs a group_id or a task_id", param="group_size")
            ticket = self.admission.ask(1)
            try:
                granted = await ticket.wait(wait)
            except asyncio.CancelledError:
                self.admission.withdraw(ticket)
                raise
            if not granted:
                self.admission.withdraw(ticket)
                raise self._no_slot()
            return None
        return await self._admit_member(body, wait)

    async def _admit_member(self, body: StartSession, wait: float) -> Group:
        size = body.group_size or self.config.group_size
        if size > self._batch_size:
            raise InvalidRequest(
                f"group_size {size} exceeds the run's batch_size {self._batch_size}",
                param="group_size",
            )
        if body.group_id is not None and self.groups.get(body.group_id) is None:  # noqa: SIM102
            if await self.journal.group(body.group_id):
                raise closed_error(body.group_id)
        group = self.groups.joinable(group_id=body.group_id, task_id=body.task_id, size=size)
        if group.ticket is None and not group.members:
            try:
                group.ticket = self.admission.ask(size)
            except TooManyRequests:
                self.groups.discard(group)
                raise
        group.openers += 1
        granted = False
        try:
            granted = group.ticket is None or await group.ticket.wait(wait)
        finally:
            group.openers -= 1
            if not granted:
                self._discard_unused(group)
        if not granted:
            raise self._no_slot()
        if group.closed or group.room < 1:
            raise closed_error(group.id)
        group.promised += 1
        return group

    def _discard_unused(self, group: Group) -> None:
        """Give back the slots (or the place) of a group that nobody got into."""
        if group.ticket is not None and group.unused:
            self.admission.withdraw(group.ticket)
            self.groups.discard(group)

    def _no_slot(self) -> TooManyRequests:
        return TooManyRequests(
            "no slot for a train session is free: the trainer has as many as it wants now; "
            "try again later, or pass `wait` (seconds) to wait for one",
            retry_after=2,
        )

    # -- look-up -------------------------------------------------------------------------------

    async def by_lane(self, lane: str) -> Session | None:
        """The lane's newest session; ended ones are read from the journal, without a tree."""
        session_id = self._lanes.get(lane)
        if session_id is not None:
            return self.live[session_id]
        row = await self.journal.session_of_lane(lane)
        return None if row is None else Session(row, expires=0.0)

    async def by_id(self, session_id: str) -> Session:
        """A session by its id; NotFound."""
        session = self.live.get(session_id)
        if session is not None:
            return session
        row = await self.journal.session(session_id)
        if row is None:
            raise NotFound(f"there is no session {session_id[:80]!r}", code="session_not_found")
        return Session(row, expires=0.0)

    async def info(self, session: Session) -> SessionInfo:
        """What is recorded of a session; an ended one's interactions are read from the journal."""
        if session.id not in self.live and not len(session.tree):
            for interaction in await self.journal.interactions(session.id):
                add_to_tree(session.tree, interaction)
        return session.info()

    # -- record --------------------------------------------------------------------------------

    async def record(self, session: Session, interaction: Interaction, key: bytes) -> None:
        """Make an interaction durable, then visible."""
        await self.journal.commit(PutInteraction(interaction))
        session.tree.add(interaction, key)

    async def mark_untrainable(self, session: Session, interaction_id: str, why: str) -> None:
        """Take an interaction out of training, e.g. one whose answer reached nobody."""
        async with session.lock:
            if session.state not in (SessionState.OPEN, SessionState.FINALIZED):
                return
            interaction = session.tree[interaction_id]
            changed = replace(interaction, untrainable_reason=why)
            await self.journal.commit(PutInteraction(changed))
            interaction.untrainable_reason = why

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
            await self.journal.commit(SetInteractionReward(interaction.id, reward))
            interaction.reward = reward
            return str(interaction.id)

    async def finalize(self, session: Session, final_reward: float | None) -> None:
        """End a session: calls under way are aborted, then nothing more can be added."""
        async with session.lock:
            session.require_open()
            session.closing = True
            try:
                await self._settle_calls(session)
                self._check_finalizable(session, final_reward)
                train = session.mode is SessionMode.TRAIN
                state = SessionState.FINALIZED if train else SessionState.EVALUATED
                row = replace(session.row, state=state, final_reward=final_reward)
                await self.journal.commit(PutSession(row))
            finally:
                session.closing = False
            session.row = row
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
            session.row = replace(session.row, state=state, reason=reason)
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
                if state not in TRANSITIONS.get(session.state, ()):
                    raise Conflict(f"session {session.id} is {session.state}; it cannot be {state}")
                by_reason.setdefault(reasons.get(session.id), []).append(session.id)
            await self.journal.commit(
                *(SetState(tuple(ids), state, why, owner) for why, ids in by_reason.items())
            )
            for session in chosen:
                session.row = replace(
                    session.row, state=state, owner=owner, reason=reasons.get(session.id)
                )
        await self._changed(chosen)

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


def add_to_tree(tree: InteractionTree, interaction: Interaction) -> None:
    """Add a stored interaction under the key that continuations look for."""
    messages = [*interaction.message_delta, interaction.output_message]
    start = tree.key(interaction.parent_id) if interaction.parent_id is not None else None
    keys = chain_keys(messages, interaction.tools, start=start)
    tree.add(interaction, keys[-1])
