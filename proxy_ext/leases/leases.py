"""Handing finalized trajectories to the trainer: lease, redelivery, acknowledgement.

Only closed groups are handed out. A lease ends by an ack, by its holder's silence, or when another
start of the trainer appears; what an earlier one still sends is refused (fence.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from any_agent.errors import Conflict, InvalidRequest, SessionClosed, SessionDamaged
from any_agent.protocol.rl import Ack, Capacity, Lease, SetCapacity
from any_agent.types import Interaction, SessionState, Trajectory
from proxy_ext.journal import SessionRow
from proxy_ext.journal.rows import EXPORT_OWNER, GRANT_OWNER, for_export, handed_out, holds
from proxy_ext.leases.fence import Fence
from proxy_ext.sessions.lease_index import LeaseIndex
from proxy_ext.sessions.session import RecordedSession
from proxy_ext.sessions.session_store import SessionStore
from proxy_ext.sessions.state_machine import Event, allowed, refusal, target

log = logging.getLogger(__name__)

_UNHEARD_OF = 15.0
"""Seconds within which a trainer says that it has what it leased; else the answer was lost."""
_ANSWER_BYTES = 64 * 2**20
"""About what one poll is answered at most, unless a single group is larger."""


_SHOWN_GROUPS = 8
_BUFFERED = (SessionState.AWAITING_REWARD, SessionState.FINALIZED, SessionState.LEASED)


class LeaseManager:
    """Leases of one rank's sessions."""

    def __init__(
        self,
        sessions: SessionStore,
        fence: Fence,
        *,
        ttl: float,
        needed: Callable[[SessionRow], bool] = handed_out,
    ) -> None:
        """``needed`` says whether a resume may want a session that a trainer has given back."""
        self._sessions = sessions
        self._needed = needed
        self._lease_index: LeaseIndex = sessions.lease_index
        self._fence = fence
        self._ttl = ttl
        self._lock = asyncio.Lock()
        self._heard: tuple[str, int] = ("", 0)
        """The trainer that set the cap last, and the number of its message."""
        self._draining = False

    async def drain(self) -> None:
        """Answer long polls at once, from now on."""
        self._draining = True
        async with self._sessions.ready:
            self._sessions.ready.notify_all()

    async def set_capacity(self, body: SetCapacity) -> Capacity:
        """Set the cap, renew the leases held, take back those that their holder does not know of:
        an earlier trainer's, and those whose answer was lost."""
        owner, number = self._heard
        if body.owner == owner and body.number < number:
            return self.capacity()
        self._heard = (body.owner, body.number)
        # At once: what follows may wait, and must not undo a later message then.
        self._sessions.admission.set_limit(body.limit, body.ttl)
        held = set(body.held)
        now = time.monotonic()
        for session in self._lease_index.leased:
            if session.row.owner == body.owner and session.id in held:
                session.lease_expires = now + self._ttl

        def unknown(session: RecordedSession) -> bool:
            if session.row.owner == body.owner:
                return session.id not in held and session.lease_began + _UNHEARD_OF < now
            return not for_export(session.row)

        if taken := await self._give_back(unknown):
            log.info("took back %d sessions that their trainer does not hold", taken)
        return self.capacity()

    def capacity(self) -> Capacity:
        counts, admission = self._sessions.counts, self._sessions.admission
        return Capacity(
            admitted=admission.admitted,
            # Also those of sessions that are being written: they are neither open nor free.
            reserved=self._sessions.reserved,
            waiting=admission.waiting,
            # What was opened on grants is no trainer's: it neither takes its slots nor fills its
            # batches, however long nobody exports it.
            running=counts.for_trainer(SessionState.OPEN),
            buffered=counts.for_trainer(*_BUFFERED),
            limit=admission.limit,
            queue=admission.queue,
            unfilled=self._sessions.groups.first_unfilled(_SHOWN_GROUPS),
            grants=self._sessions.grants.left + self._sessions.run_grants.left,
        )

    async def lease(self, body: Lease, *, epoch: int | None = None) -> list[Trajectory]:
        """Closed groups, oldest first; waits for one up to ``wait`` seconds, then nothing.

        StaleOwner if a later start of the trainer than ``epoch`` appeared meanwhile.
        """
        if body.owner == GRANT_OWNER:
            raise InvalidRequest(f"no trainer may be named {GRANT_OWNER!r}", param="owner")
        if body.replay and body.session_ids is None:
            raise InvalidRequest("replay needs session_ids", param="session_ids")
        if body.session_ids is not None:
            again = self.replay if body.replay else self.lease_sessions
            return await again(body.session_ids, body.owner)
        deadline = time.monotonic() + body.wait
        ready = self._sessions.ready
        while True:
            async with self._lock:
                self._fence.check(epoch)
                groups = self._lease_index.first(body.max_groups)
                if groups:
                    try:
                        return await self._take(await self._as_fit(groups), body.owner)
                    except (Conflict, SessionClosed):
                        # A member was vetoed or deleted meanwhile; the next look sees it.
                        continue
            remaining = deadline - time.monotonic()
            if remaining <= 0 or self._draining:
                return []
            async with ready:
                # Looked at again under the condition's lock: a group that closed since then
                # has notified nobody.
                if not self._lease_index.first(1) and not self._draining:
                    try:
                        async with asyncio.timeout(remaining):
                            await ready.wait()
                    except TimeoutError:
                        return []

    async def lease_sessions(self, session_ids: list[str], owner: str) -> list[Trajectory]:
        """These sessions; Conflict if one is not waiting to be leased, or is not for an export."""
        async with self._lock:
            chosen = []
            for session_id in dict.fromkeys(session_ids):
                session = await self._sessions.by_id(session_id)
                ours = session.state is SessionState.LEASED and holds(session.row, owner)
                if session.state is not SessionState.FINALIZED and not ours:
                    raise refusal(session.row, Event.LEASE)
                if owner != EXPORT_OWNER and session.row.owner == GRANT_OWNER:
                    raise refusal(session.row, Event.LEASE)
                if owner == EXPORT_OWNER and self._needed(session.row):
                    # Taken by an export it would be revised, or acknowledged, behind its back.
                    raise refusal(session.row, Event.LEASE)
                chosen.append(session)
            return await self._take(chosen, owner)

    async def replay(self, session_ids: list[str], owner: str) -> list[Trajectory]:
        """These sessions once more, whatever a step has made of them.

        For a resume from before that step: the one way out of `trained` and `rejected`. Conflict
        naming those that no step took, that an export holds, or whose content is gone.
        """
        async with self._lock:
            chosen = [await self._sessions.by_id(id) for id in dict.fromkeys(session_ids)]
            wrong = [
                f"{session.id} is {session.state}"
                + (f", its content {session.row.content}" * (session.row.content != "stored"))
                for session in chosen
                if not allowed(session.row, Event.REPLAY)
            ]
            if wrong:
                raise Conflict(
                    f"{len(wrong)} sessions cannot be trained on again: {'; '.join(wrong[:8])}",
                    code="not_replayable",
                )
            return await self._take(chosen, owner, Event.REPLAY)

    async def ack(self, body: Ack) -> int:
        """End leases for good. Sessions already in the wanted state are left so."""
        reasons = {r.session_id: r.reason for r in body.rejected}
        async with self._lock:
            trained = await self._leased_by(body.owner, body.trained, Event.TRAIN)
            rejected = await self._leased_by(body.owner, list(reasons), Event.REJECT)
            move, by, step = self._sessions.move, body.owner, body.step
            await move(trained, Event.TRAIN, owner=by, step=step)
            await move(rejected, Event.REJECT, reasons=reasons, owner=by, step=step)
        return len(trained) + len(rejected)

    async def expire(self) -> None:
        """Give back what a silent holder leased."""
        if lapsed := await self._give_back(lambda s: s.lease_expires <= time.monotonic()):
            log.warning("%d leases ran out; their sessions are handed out again", lapsed)

    def held_by(self, owner: str) -> set[str]:
        """The sessions that one holder has leased."""
        return {s.id for s in self._lease_index.leased if holds(s.row, owner)}

    async def give_back(self, session_ids: list[str], owner: str) -> None:
        """End leases of one holder without an effect."""
        ids = set(session_ids)
        await self._give_back(lambda s: s.id in ids and holds(s.row, owner))

    # ------------------------------------------------------------------------------------------

    async def _give_back(self, ended: Callable[[RecordedSession], bool]) -> int:
        """End the leases that are ``ended``, without an effect; their number."""
        if not any(map(ended, self._lease_index.leased)):
            return 0
        async with self._lock:
            # Looked at again: whoever had the lock may have leased or renewed some of them.
            chosen = [session for session in self._lease_index.leased if ended(session)]
            if chosen:
                await self._sessions.move(chosen, Event.RELEASE)
        return len(chosen)

    async def _as_fit(self, groups: list[list[RecordedSession]]) -> list[RecordedSession]:
        """The members of the first groups that one answer takes."""
        chosen: list[RecordedSession] = []
        size = 0
        for members in groups:
            try:
                for session in members:
                    await self._sessions.load(session)
                    size += sum(map(_bytes, session.tree))
            except SessionDamaged:
                # It is being ended; its group comes without it.
                continue
            if chosen and size > _ANSWER_BYTES:
                break
            chosen += members
        return chosen

    async def _take(
        self, chosen: list[RecordedSession], owner: str, event: Event = Event.LEASE
    ) -> list[Trajectory]:
        live = self._sessions.live
        # Leased in the journal alone: the store failed in the middle of a replay.
        fresh = [
            s
            for s in chosen
            if s.state is not SessionState.LEASED or not holds(s.row, owner) or s.id not in live
        ]
        for session in chosen:
            # Before they are leased: a sweep must not take new leases for ones that ran out.
            session.lease_began = time.monotonic()
            session.lease_expires = session.lease_began + self._ttl
        # Shielded: a poller that leaves now must not leave the journal ahead of the memory.
        write = asyncio.ensure_future(self._hand_out(fresh, owner, event))
        try:
            await asyncio.shield(write)
        except asyncio.CancelledError:
            await asyncio.wait([write])
            if write.exception() is None:
                await self._sessions.move(fresh, Event.RELEASE)
            raise
        out = []
        for session in chosen:
            await self._sessions.load(session)
            out.append(trajectory(session))
        return out

    async def _hand_out(self, sessions: list[RecordedSession], owner: str, event: Event) -> None:
        ended = [session for session in sessions if session.id not in self._sessions.live]
        for session in ended:
            await self._sessions.load(session)
        groups = await self._sessions.groups_of(ended)
        await self._sessions.move(sessions, event, owner=owner)
        self._sessions.revive(ended, groups)

    async def _leased_by(
        self, owner: str, session_ids: list[str], event: Event
    ) -> list[RecordedSession]:
        """Those of them that the event still changes; Conflict for one that he does not hold."""
        found = []
        for session_id in dict.fromkeys(session_ids):
            session = await self._sessions.by_id(session_id)
            if target(session.row, event) is session.state:
                continue
            if not holds(session.row, owner):
                raise Conflict(
                    f"session {session_id} is not leased by {owner}; its lease ran out or was "
                    "taken back",
                    code="lease_lost",
                    details={"state": str(session.state)},
                )
            found.append(session)
        return found


def _bytes(interaction: Interaction) -> int:
    """About what it is on the wire: its arrays, and texts that are at most some bytes a token."""
    return 16 * (len(interaction.prompt_delta_ids) + len(interaction.output_ids))


def trajectory(session: RecordedSession) -> Trajectory:
    """A session as the trainer receives it."""
    interactions: list[Interaction] = list(session.tree)
    row = session.row
    return Trajectory(
        session_id=row.id,
        group_id=row.group_id or row.id,
        interactions=interactions,
        final_reward=row.final_reward,
        task_id=row.task_id,
        metadata=row.metadata,
    )
