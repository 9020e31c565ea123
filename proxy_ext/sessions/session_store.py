"""The live sessions of one rank: found, recovered, recorded, and moved from state to state.

Each change is checked against the table of states (state_machine.py), written to the journal, then
made in memory, under the session's lock. endings.py ends sessions, rewards.py rewards them, and
expiry.py watches their time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Literal, Protocol
from weakref import WeakValueDictionary

from any_agent.auth.access import RUN, Caller
from any_agent.completions.params.call import ChatCall
from any_agent.completions.untrainable import UntrainableReason
from any_agent.config import SessionConfig
from any_agent.errors import NotFound, SessionDamaged, StoreUnavailable
from any_agent.record import InteractionTree, TrainabilityWatch, strip_content
from any_agent.rundir.usage import day_of
from any_agent.types import (
    TERMINAL_STATES,
    Interaction,
    Message,
    SessionMode,
    SessionState,
)
from proxy_ext.journal import (
    EraseContent,
    Journal,
    PutInteraction,
    RequestMark,
    SessionRow,
    SetState,
    Statement,
)
from proxy_ext.journal.base import NO_PLACE, CountUsage
from proxy_ext.sessions.conversation_index import ConversationIndex
from proxy_ext.sessions.delivery import (
    UNDELIVERED,
    UNMARKED,
    DeliveryTracker,
    undelivered,
    was_used,
)
from proxy_ext.sessions.groups import Group, GroupBook
from proxy_ext.sessions.ids import ArealIds, SessionIds
from proxy_ext.sessions.indexes import DeadlineQueue, LeaseIndex, SessionCounts
from proxy_ext.sessions.session import LIVE_STATES, RecordedSession, session_age
from proxy_ext.sessions.slots import Admission, GrantBook
from proxy_ext.sessions.state_machine import Event, owner_after, target
from proxy_ext.sessions.tree_cache import TreeCache

log = logging.getLogger(__name__)


class AnswerJudge(Protocol):
    """Judges the policy's answers before they are recorded."""

    async def __call__(
        self, call: ChatCall, answer: Message, *, trainable: bool
    ) -> UntrainableReason | None:
        """Return a reason against training; ``trainable``: False if there is one already."""


class SessionListener(Protocol):
    """A listener to the sessions' durable changes; it must not wait."""

    def on_call(
        self, session: RecordedSession | None, interaction: Interaction, tenant: str | None
    ) -> None: ...

    def on_write(
        self, before: SessionRow, after: SessionRow, statements: Iterable[Statement]
    ) -> None: ...


class SessionStore:
    """The sessions of a rank, backed by its journal, and the indexes over them."""

    def __init__(
        self,
        journal: Journal,
        config: SessionConfig,
        ids: SessionIds,
        *,
        rank: int,
    ) -> None:
        self.journal = journal
        self.config = config
        self.ids = ids
        self.rank = rank
        self.grants = GrantBook(journal, "grants")
        self.run_grants = GrantBook(journal, "run_grants")
        """Grants of the run's own trainer."""
        self.areal_ids = ArealIds(journal, rank)
        self.admission = Admission(max_waiting=config.max_waiting)
        self.groups = GroupBook(ids, timeout=config.group_timeout, min_size=config.min_group_size)
        self.counts = SessionCounts()
        self.deadlines = DeadlineQueue()
        """Sessions by the time at which they may expire."""
        self.deliveries = DeliveryTracker(journal)
        self.metered = False
        """Calls are counted for a bill."""
        self.undelivered = 0
        """Number of answers taken out of training because they reached no client."""
        self.trainability = TrainabilityWatch()
        self.listeners: tuple[SessionListener, ...] = ()
        """Learn of what is durable."""
        self.refuses: AnswerJudge | None = None
        """Judges an answer before it is recorded, if anything does."""
        self.live: dict[str, RecordedSession] = {}
        self.trees = TreeCache(journal, self.deliveries, self.live, budget=config.hot_bytes)
        self._ended: WeakValueDictionary[str, RecordedSession] = WeakValueDictionary()
        """Ended sessions in use: all users share one object, and its lock."""
        self._lanes: dict[str, str] = {}
        self.lease_index = LeaseIndex(self.live, self.groups)
        self.conversations = ConversationIndex()
        self._tasks: set[asyncio.Task[None]] = set()
        self.ready = asyncio.Condition()
        """A condition that is notified whenever a group may have closed."""

    # -- start ---------------------------------------------------------------------------------

    async def recover(self, *, lease_ttl: float) -> None:
        """Load the live sessions from the journal: open ones continue, finalized ones wait.

        Their interactions are read on demand, so that a start is quick.
        """
        now = time.monotonic()
        for row in await self.journal.sessions(LIVE_STATES):
            session = RecordedSession(row, self.idle_timeout(row))
            # As if the lease began now: its owner may not know of it yet.
            session.lease_began, session.lease_expires = now, now + lease_ttl
            session.recovered = True
            self.live[row.id] = session
            self.conversations.add(session, new=False)
            self.watch(session)
        await self._recover_groups()
        for session in self.live.values():
            self.lease_index.update(session)
        self.counts.recover(await self.journal.counts(), (s.row for s in self.live.values()))
        await self.grants.recover()
        await self.run_grants.recover()
        admitted = self.counts.created[SessionMode.TRAIN] - self._on_grants
        self.admission.admitted = admitted + self.groups.reserved
        if self.live:
            log.info("recovered %d sessions from the journal", len(self.live))

    async def _recover_groups(self) -> None:
        # Also groups without a live member that further members may join.
        since = time.time() - self.config.group_timeout
        unfilled = await self.journal.unfilled_groups(since, left=NO_PLACE)
        for group_id in dict.fromkeys([*(s.row.group_id for s in self.live.values()), *unfilled]):
            if group_id is not None:
                group = self._recovered(await self.journal.group(group_id))
                if not group.done:
                    self.groups.add(group)

    def _recovered(self, rows: list[SessionRow]) -> Group:
        return self.groups.from_rows(rows, age=session_age(rows[0]))

    async def groups_of(self, sessions: Iterable[RecordedSession]) -> list[Group]:
        """Return the groups of ended sessions that are to be leased again, from the journal."""
        ids = dict.fromkeys(session.row.group_id for session in sessions)
        gone = [id for id in ids if id is not None and self.groups.get(id) is None]
        return [self._recovered(await self.journal.group(id)) for id in gone]

    def revive(self, sessions: Iterable[RecordedSession], groups: Iterable[Group]) -> None:
        """Make ended sessions that are leased again live, with their groups."""
        for group in groups:
            self.groups.restore(group)
        for session in sessions:
            self.live[session.id] = session
            if session.loaded:
                self.trees.add(session)
            group_id = session.row.group_id
            if group_id is not None and (found := self.groups.get(group_id)) is not None:
                found.update(session.row)
            self.lease_index.update(session)

    @property
    def reserved(self) -> int:
        """Number of slots taken by train sessions that are not open yet."""
        created = self.counts.created[SessionMode.TRAIN]
        return self.admission.admitted + self._on_grants - created

    @property
    def _on_grants(self) -> int:
        """Number of sessions that took a grant instead of a slot."""
        return self.grants.spent + self.run_grants.spent

    def grants_of(self, caller: Caller) -> GrantBook:
        """Return the grants that this caller makes and uses."""
        return self.run_grants if caller == RUN else self.grants

    def add(self, session: RecordedSession) -> None:
        """Add a new session that the journal has, the newest of its lane."""
        self.counts.add(session.row)
        self.live[session.id] = session
        session.tree = InteractionTree()
        self.trees.add(session)
        self._lanes[session.row.lane] = session.id
        self.conversations.add(session, new=True)
        self.watch(session)

    def idle_timeout(self, row: SessionRow) -> float:
        """Return the seconds that this session may be idle."""
        config = self.config
        return config.implicit_idle_timeout if row.implicit else config.idle_timeout

    def watch(self, session: RecordedSession) -> None:
        """Schedule a check of the session for when its time may be over."""
        if session.state is SessionState.OPEN:
            self.deadlines.add(session.id, min(session.expires, session.idle_expires))
        elif session.state is SessionState.AWAITING_REWARD:
            self.deadlines.add(session.id, session.reward_due)
        else:
            self.deadlines.discard(session.id)

    # -- look-up -------------------------------------------------------------------------------

    async def by_lane(self, lane: str) -> RecordedSession | None:
        """Return a lane's newest session; an ended one comes from the journal, without a tree."""
        session_id = self._lanes.get(lane)
        if session_id is not None:
            return self.live[session_id]
        row = await self.journal.session_of_lane(lane)
        if row is None:
            return None
        session = self._stored(row)
        if session.state is SessionState.OPEN and session.id in self.live:
            # A recovered session. While it is open, its lane gets no other one.
            self._lanes.setdefault(lane, session.id)
        return session

    def live_by_lane(self, lane: str) -> RecordedSession | None:
        """Return a lane's session if it is in memory."""
        return self.live.get(self._lanes.get(lane, ""))

    async def by_id(self, session_id: str) -> RecordedSession:
        """Return a session by its id; NotFound if there is none."""
        session = self.live.get(session_id)
        if session is not None:
            return session
        row = await self.journal.session(session_id)
        if row is None:
            raise no_session(session_id)
        return self._stored(row)

    def _stored(self, row: SessionRow) -> RecordedSession:
        """Return an ended session, or the live one if it was opened while its row was read."""
        session = self.live.get(row.id) or self._ended.get(row.id)
        if session is None:
            session = self._ended[row.id] = RecordedSession(row)
        return session

    async def load(self, session: RecordedSession) -> None:
        """Load the session's tree.

        It stays in memory until the next `await`, and while the session's lock is held or one of
        its calls is under way.
        """
        try:
            await self.trees.load(session)
        except SessionDamaged:
            # In a task of its own: the caller may hold the session's lock.
            task = asyncio.create_task(self._end_damaged(session))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            raise

    async def _end_damaged(self, session: RecordedSession) -> None:
        """End a session that cannot be read completely, so that it is never trained on."""
        async with session.lock:
            row = session.row
            if row.content == "deleted":
                return
            if (state := target(row, Event.DAMAGE)) is not row.state:
                row = ended(replace(row, owner=None), state)
            row = replace(row, reason="damaged", content="deleted", metadata={})
            try:
                await self.write(session, row, set_state(row), EraseContent((row.id,)))
            except StoreUnavailable as error:
                log.warning("the damaged session %s could not be ended: %s", row.id, error.message)
                return
            session.tree = InteractionTree()
            self.journal.stats.damaged += 1

    # -- record --------------------------------------------------------------------------------

    async def record(
        self,
        session: RecordedSession,
        interaction: Interaction,
        key: bytes,
        mark: RequestMark | None,
        *also: Statement,
    ) -> Interaction:
        """Make an interaction durable, then visible; ``mark`` identifies retries of its request.

        ``also``: written with it. Return what was recorded, without its texts if these are not
        stored.
        """
        mark = mark or UNMARKED
        if not self.config.store_content:
            interaction = strip_content(interaction)
        with self.trees.pinned(session):
            await self.load(session)
            await self.deliveries.commit(PutInteraction(interaction, key, mark), *also)
            session.tree.add(interaction, key)
            self.conversations.add_answer(session, interaction, key)
            self.trees.add_interaction(session, interaction)
            for listener in self.listeners:
                listener.on_call(session, interaction, session.row.tenant)
        return interaction

    def usage_of(self, interaction: Interaction, *, prompt: int | None) -> tuple[CountUsage, ...]:
        """Return the statement that counts a call's first choice, with the length of its
        ``prompt``, or another choice (None); nothing where calls are not counted."""
        if not self.metered:
            return ()
        day, sampled = day_of(interaction.created_at), len(interaction.output_ids)
        return (CountUsage(day, prompt or 0, sampled, int(prompt is not None)),)

    async def mark_undelivered(self, session: RecordedSession, interaction: Interaction) -> None:
        """Exclude an interaction whose answer reached no client from training.

        An interaction that is untrainable for another reason is marked as well: no reward without
        an id is meant for it.
        """
        async with session.lock:
            await self.load(session)
            taking_calls = session.state is SessionState.OPEN
            marked = interaction.untrainable_reason == UNDELIVERED
            if taking_calls and not marked and not was_used(session, interaction):
                await self.journal.commit(PutInteraction(undelivered(interaction)))
                interaction.untrainable_reason = UNDELIVERED
                self.conversations.mark_undelivered(session, interaction.id)
                self.undelivered += 1

    # -- change --------------------------------------------------------------------------------

    async def write(
        self, session: RecordedSession, row: SessionRow, *statements: Statement
    ) -> None:
        """Commit a change of one session and its idempotent answer, then make ``row`` its row.

        The caller holds its lock, and has checked the change against the table of states.
        """
        await self.journal.commit(*statements)
        self._set_row(session, row, statements)
        await self._update_indexes([session])

    async def move(
        self,
        sessions: Iterable[RecordedSession],
        event: Event,
        *,
        reasons: Mapping[str, str] | None = None,
        owner: str | None = None,
        step: int | None = None,
    ) -> None:
        """Apply one event to several sessions in one write.

        If the table refuses one of them, this raises the refusal and changes nothing.
        """
        chosen = sorted(sessions, key=lambda session: session.id)
        reasons = reasons or {}
        async with AsyncExitStack() as locks:
            # In the order of their ids, so that two callers cannot wait for each other.
            for session in chosen:
                await locks.enter_async_context(session.lock)
            rows = []
            for row in (session.row for session in chosen):
                state = target(row, event)
                owned = replace(row, owner=owner_after(row, event, owner), step=step)
                # A replay drops the reason of a rejection; that a session counts as 0 stays.
                reason = None if row.state is SessionState.REJECTED else row.reason
                rows.append(ended(owned, state, reasons.get(row.id, reason)))
            await self.journal.commit(*_set_states(rows))
            for session, row in zip(chosen, rows, strict=True):
                self._set_row(session, row)
        await self._update_indexes(chosen)

    def _set_row(
        self, session: RecordedSession, row: SessionRow, statements: Iterable[Statement] = ()
    ) -> None:
        before, session.row = session.row, row
        self.counts.move(before, row)
        for listener in self.listeners:
            listener.on_write(before, row, statements)

    async def _update_indexes(self, sessions: Iterable[RecordedSession]) -> None:
        """Update groups and indexes to the sessions' states, and wake long polls."""
        sessions = list(sessions)
        self.conversations.refresh(sessions)
        for session in sessions:
            self.watch(session)
            group = self.groups.get(session.row.group_id) if session.row.group_id else None
            if group is not None:
                room = group.room
                group.update(session.row)
                # A place that was given up keeps its slot.
                self.admission.admitted += group.room - room
                if group.done:
                    self.groups.discard(group)
            if session.state in TERMINAL_STATES:
                self.live.pop(session.id, None)
                self.trees.remove(session)
                self._ended[session.id] = session
                # The lane may have its next session already.
                if self._lanes.get(session.row.lane) == session.id:
                    del self._lanes[session.row.lane]
            self.lease_index.update(session)
        await self.wake_pollers()

    async def group_changed(self, group: Group) -> None:
        """Update the indexes after a group stopped taking members."""
        if group.done:
            self.groups.discard(group)
        self.lease_index.update_group(group.id)
        await self.wake_pollers()

    def mark_content(
        self, session_ids: Iterable[str], content: Literal["archived", "deleted"]
    ) -> None:
        """Record in memory where the content of these ended sessions is now."""
        for session_id in session_ids:
            session = self._ended.get(session_id)
            if session is not None:
                session.row = replace(session.row, content=content)
                session.unload()

    async def wake_pollers(self) -> None:
        async with self.ready:
            self.ready.notify_all()


def no_session(id: str) -> NotFound:
    """Return the error for a session that does not exist or that the caller must not see."""
    return NotFound(f"there is no session {id[:80]!r}; check its id", code="session_not_found")


def ended(row: SessionRow, state: SessionState, reason: str | None = None) -> SessionRow:
    """Return the row in this state, with the time of its end if the state is terminal."""
    at = time.time() if state in TERMINAL_STATES else None
    if reason is not None:
        # A grader's error may have a lone surrogate, which no store takes.
        reason = reason.encode(errors="replace").decode()
    return replace(row, state=state, reason=reason, ended_at=at)


def set_state(row: SessionRow) -> SetState:
    """Return the statement that writes this row's state."""
    return SetState((row.id,), row.state, row.reason, row.owner, row.step, row.ended_at)


def _set_states(rows: Iterable[SessionRow]) -> list[SetState]:
    """Return statements that write the rows' states, one for all rows with the same state."""
    same: dict[tuple[SessionState, str | None, str | None], list[SessionRow]] = {}
    for row in rows:
        # Sessions that are given back keep owners of their own.
        same.setdefault((row.state, row.reason, row.owner), []).append(row)
    return [
        replace(set_state(group[0]), session_ids=tuple(row.id for row in group))
        for group in same.values()
    ]
