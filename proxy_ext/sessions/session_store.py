"""The live sessions of one rank: found, recovered, recorded, and moved from state to state.

Each change is checked against the table of states (lifecycle.py), written to the journal, then made
in memory, under the session's lock. What ends sessions is in endings.py, what rewards them in
rewards.py, what watches their time in expiry.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from weakref import WeakValueDictionary

from pydantic import BaseModel

from any_agent.auth.access import RUN, Caller
from any_agent.config import SessionConfig
from any_agent.errors import NotFound, SessionDamaged, StoreUnavailable
from any_agent.record import InteractionTree, strip_content
from any_agent.types import TERMINAL_STATES, Interaction, SessionMode, SessionState
from proxy_ext.journal import (
    EraseContent,
    Journal,
    PutInteraction,
    RequestMark,
    SessionRow,
    SetState,
    Statement,
)
from proxy_ext.journal.rows import NO_PLACE
from proxy_ext.journal.statements import KeepAnswer, no_receipt
from proxy_ext.sessions.conversation_index import ConversationIndex
from proxy_ext.sessions.counts import SessionCounts
from proxy_ext.sessions.deadlines import DeadlineQueue
from proxy_ext.sessions.delivery import (
    UNDELIVERED,
    UNMARKED,
    DeliveryTracker,
    undelivered,
    was_used,
)
from proxy_ext.sessions.grants import GrantBook
from proxy_ext.sessions.groups import Group, GroupBook
from proxy_ext.sessions.ids import ArealIds, SessionIds
from proxy_ext.sessions.lease_index import LeaseIndex
from proxy_ext.sessions.session import LIVE_STATES, RecordedSession, session_age
from proxy_ext.sessions.slots import Admission
from proxy_ext.sessions.state_machine import Event, owner_after, target
from proxy_ext.sessions.tree_cache import TreeCache

log = logging.getLogger(__name__)


class SessionStore:
    """The sessions of a rank, backed by its journal."""

    def __init__(
        self,
        journal: Journal,
        config: SessionConfig,
        names: SessionIds,
        *,
        rank: int,
    ) -> None:
        self.journal = journal
        self.config = config
        self.names = names
        self.rank = rank
        self.grants = GrantBook(journal, "grants")
        self.run_grants = GrantBook(journal, "run_grants")
        """Of the run's own trainer."""
        self.task_names = ArealIds(journal, rank)
        self.admission = Admission(max_waiting=config.max_waiting)
        self.groups = GroupBook(names, timeout=config.group_timeout, least=config.min_group_size)
        self.counts = SessionCounts()
        self.deadlines = DeadlineQueue()
        """When to look at which session again."""
        self.deliveries = DeliveryTracker(journal)
        self.undelivered = 0
        """Answers taken out of training because they reached nobody."""
        self.live: dict[str, RecordedSession] = {}
        self.trees = TreeCache(journal, self.deliveries, self.live, budget=config.hot_bytes)
        self._held: WeakValueDictionary[str, RecordedSession] = WeakValueDictionary()
        """Ended ones that somebody is at work with: whoever asks next shares them, and the lock."""
        self._lanes: dict[str, str] = {}
        self.leasable = LeaseIndex(self.live, self.groups)
        self.implicit = ConversationIndex()
        self._ending: set[asyncio.Task[None]] = set()
        self.ready = asyncio.Condition()
        """Notified whenever a group may have closed."""

    # -- start ---------------------------------------------------------------------------------

    async def recover(self, *, lease_ttl: float) -> None:
        """Take over what the journal holds: open sessions go on, finalized ones wait.

        What they recorded is read when somebody wants it, so that a start is soon done.
        """
        now = time.monotonic()
        for row in await self.journal.sessions(LIVE_STATES):
            session = RecordedSession(row, self.idle_timeout(row))
            # As if it began now: its holder may not have heard yet that it has it.
            session.lease_began, session.lease_expires = now, now + lease_ttl
            session.recovered = True
            self.live[row.id] = session
            self.implicit.add(session, new=False)
            self.watch(session)
        await self._recover_groups()
        for session in self.live.values():
            self.leasable.note(session)
        self.counts.recover(await self.journal.counts(), (s.row for s in self.live.values()))
        await self.grants.recover()
        await self.run_grants.recover()
        admitted = self.counts.created[SessionMode.TRAIN] - self._on_grants
        self.admission.admitted = admitted + self.groups.reserved
        if self.live:
            log.info("recovered %d sessions from the journal", len(self.live))

    async def _recover_groups(self) -> None:
        # Also those that nobody is in any more, but could still join.
        since = time.time() - self.config.group_timeout
        unfilled = await self.journal.unfilled_groups(since, left=NO_PLACE)
        for group_id in dict.fromkeys([*(s.row.group_id for s in self.live.values()), *unfilled]):
            if group_id is not None:
                group = self._recovered(await self.journal.group(group_id))
                if not group.done:
                    self.groups.add(group)

    def _recovered(self, rows: list[SessionRow]) -> Group:
        return self.groups.recovered(rows, age=session_age(rows[0]))

    async def groups_of(self, sessions: Iterable[RecordedSession]) -> list[Group]:
        """The groups of ended sessions that are to be leased again, from the journal."""
        ids = dict.fromkeys(session.row.group_id for session in sessions)
        gone = [id for id in ids if id is not None and self.groups.get(id) is None]
        return [self._recovered(await self.journal.group(id)) for id in gone]

    def revive(self, sessions: Iterable[RecordedSession], groups: Iterable[Group]) -> None:
        """Put ended sessions that are leased again back among the live ones, with their groups."""
        for group in groups:
            self.groups.restore(group)
        for session in sessions:
            self.live[session.id] = session
            if session.warm:
                self.trees.keep(session)
            group_id = session.row.group_id
            if group_id is not None and (found := self.groups.get(group_id)) is not None:
                found.note(session.row)
            self.leasable.note(session)

    @property
    def reserved(self) -> int:
        """Slots taken by train sessions that are not there yet."""
        created = self.counts.created[SessionMode.TRAIN]
        return self.admission.admitted + self._on_grants - created

    @property
    def _on_grants(self) -> int:
        """Sessions that took a grant and no slot."""
        return self.grants.spent + self.run_grants.spent

    def grants_of(self, caller: Caller) -> GrantBook:
        """What this caller grants, and opens sessions on."""
        return self.run_grants if caller == RUN else self.grants

    def add(self, session: RecordedSession) -> None:
        """A new session that the journal has; its lane's newest one."""
        self.counts.add(session.row)
        self.live[session.id] = session
        session.tree = InteractionTree()
        self.trees.keep(session)
        self._lanes[session.row.lane] = session.id
        self.implicit.add(session, new=True)
        self.watch(session)

    def idle_timeout(self, row: SessionRow) -> float:
        """Seconds that this session may be idle."""
        config = self.config
        return config.implicit_idle_timeout if row.implicit else config.idle_timeout

    def watch(self, session: RecordedSession) -> None:
        """See to it that its time is looked at when it may be over."""
        if session.state is SessionState.OPEN:
            self.deadlines.add(session.id, min(session.expires, session.idle_expires))
        elif session.state is SessionState.AWAITING_REWARD:
            self.deadlines.add(session.id, session.reward_due)
        else:
            self.deadlines.discard(session.id)

    # -- look-up -------------------------------------------------------------------------------

    async def by_lane(self, lane: str) -> RecordedSession | None:
        """The lane's newest session; ended ones are read from the journal, without a tree."""
        session_id = self._lanes.get(lane)
        if session_id is not None:
            return self.live[session_id]
        row = await self.journal.session_of_lane(lane)
        if row is None:
            return None
        session = self._stored(row)
        if session.state is SessionState.OPEN and session.id in self.live:
            # One that was recovered. While it is open, its lane gets no other one.
            self._lanes.setdefault(lane, session.id)
        return session

    async def by_id(self, session_id: str) -> RecordedSession:
        """A session by its id; NotFound."""
        session = self.live.get(session_id)
        if session is not None:
            return session
        row = await self.journal.session(session_id)
        if row is None:
            raise NotFound(f"there is no session {session_id[:80]!r}", code="session_not_found")
        return self._stored(row)

    def _stored(self, row: SessionRow) -> RecordedSession:
        """An ended session; or the live one, if it was opened while its row was being read."""
        session = self.live.get(row.id) or self._held.get(row.id)
        if session is None:
            session = self._held[row.id] = RecordedSession(row)
        return session

    async def load(self, session: RecordedSession) -> None:
        """See to it that the session has its tree; it is there until the next `await`.

        And as long as its lock is held, or one of its calls is under way.
        """
        try:
            await self.trees.load(session)
        except SessionDamaged:
            # Not here: whoever wants the tree may hold the session's lock.
            task = asyncio.create_task(self._end_damaged(session))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
            raise

    async def _end_damaged(self, session: RecordedSession) -> None:
        """End a session of which something cannot be read, so that it is never trained on."""
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
                log.warning("could not end session %s, damaged: %s", row.id, error.message)
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
    ) -> Interaction:
        """Make an interaction durable, then visible; ``mark``: by which retries are known.

        What was recorded, without its texts if they are not to be kept.
        """
        mark = mark or UNMARKED
        if not self.config.store_content:
            interaction = strip_content(interaction)
        with self.trees.pinned(session):
            await self.load(session)
            await self.deliveries.commit(PutInteraction(interaction, key, mark))
            session.tree.add(interaction, key)
            self.implicit.recorded(session, interaction, key)
            self.trees.grew(session, interaction)
        return interaction

    async def mark_undelivered(self, session: RecordedSession, interaction: Interaction) -> None:
        """Take an interaction out of training whose answer reached nobody.

        Also one that is not trained on for another reason: no reward is meant for it, either.
        """
        async with session.lock:
            await self.load(session)
            taking_calls = session.state is SessionState.OPEN
            told = interaction.untrainable_reason == UNDELIVERED
            if taking_calls and not told and not was_used(session, interaction):
                await self.journal.commit(PutInteraction(undelivered(interaction)))
                interaction.untrainable_reason = UNDELIVERED
                self.implicit.unheard(session, interaction.id)
                self.undelivered += 1

    # -- change --------------------------------------------------------------------------------

    async def write(
        self,
        session: RecordedSession,
        row: SessionRow,
        *statements: Statement,
        answer: BaseModel | None = None,
        keep: KeepAnswer = no_receipt,
    ) -> None:
        """Commit a change of one session, with what keeps its answer; then its row is this one.

        The caller has its lock, and has asked the table.
        """
        kept = keep(answer) if answer is not None else ()
        await self.journal.commit(*statements, *kept)
        self._set_row(session, row)
        await self._changed([session])

    async def move(
        self,
        sessions: Iterable[RecordedSession],
        event: Event,
        *,
        reasons: Mapping[str, str] | None = None,
        owner: str | None = None,
        step: int | None = None,
    ) -> None:
        """Let the same happen to several sessions at once; one write.

        Raises what the table refuses one of them with; nothing is changed then.
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
                held = replace(row, owner=owner_after(row, event, owner), step=step)
                # That it counts as 0 stays true; why it was rejected does not, if it is replayed.
                said = None if row.state is SessionState.REJECTED else row.reason
                rows.append(ended(held, state, reasons.get(row.id, said)))
            await self.journal.commit(*_set_states(rows))
            for session, row in zip(chosen, rows, strict=True):
                self._set_row(session, row)
        await self._changed(chosen)

    def _set_row(self, session: RecordedSession, row: SessionRow) -> None:
        """What the journal has of it now."""
        self.counts.move(session.row, row)
        session.row = row

    async def _changed(self, sessions: Iterable[RecordedSession]) -> None:
        """Bring groups and look-up tables in line with new states; wake long polls."""
        sessions = list(sessions)
        self.implicit.changed(sessions)
        for session in sessions:
            self.watch(session)
            group = self.groups.get(session.row.group_id) if session.row.group_id else None
            if group is not None:
                room = group.room
                group.note(session.row)
                # A place that was given back keeps its slot.
                self.admission.admitted += group.room - room
                if group.done:
                    self.groups.discard(group)
            if session.state in TERMINAL_STATES:
                self.live.pop(session.id, None)
                self.trees.forget(session)
                self._held[session.id] = session
                # The lane may have its next session already.
                if self._lanes.get(session.row.lane) == session.id:
                    del self._lanes[session.row.lane]
            self.leasable.note(session)
        await self.wake()

    async def group_changed(self, group: Group) -> None:
        """A group takes no more members."""
        if group.done:
            self.groups.discard(group)
        self.leasable.note_group(group.id)
        await self.wake()

    def archived(self, session_ids: Iterable[str]) -> None:
        """An archive holds the content of these ended ones now."""
        for session_id in session_ids:
            session = self._held.get(session_id)
            if session is not None:
                session.row = replace(session.row, content="archived")
                session.cool()

    async def wake(self) -> None:
        """Long polls look again."""
        async with self.ready:
            self.ready.notify_all()


def ended(row: SessionRow, state: SessionState, reason: str | None = None) -> SessionRow:
    """The row in this state, with the time of its end if it is one."""
    at = time.time() if state in TERMINAL_STATES else None
    return replace(row, state=state, reason=reason, ended_at=at)


def set_state(row: SessionRow) -> SetState:
    """What writes this row's state."""
    return SetState((row.id,), row.state, row.reason, row.owner, row.step, row.ended_at)


def _set_states(rows: Iterable[SessionRow]) -> list[SetState]:
    """As few statements as do: one for rows that differ in nothing that it writes."""
    same: dict[tuple[SessionState, str | None, str | None], list[SessionRow]] = {}
    for row in rows:
        # Those that are given back have owners of their own.
        same.setdefault((row.state, row.reason, row.owner), []).append(row)
    return [
        replace(set_state(group[0]), session_ids=tuple(row.id for row in group))
        for group in same.values()
    ]
