"""Handing finalized trajectories to the trainer: lease, redelivery, acknowledgement.

Only closed groups are handed out. A lease ends by an ack, by its holder's silence, or when another
incarnation of the trainer appears.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from any_agent.errors import Conflict, InvalidRequest
from any_agent.protocol import Ack, Capacity, Lease, SetCapacity
from any_agent.types import Interaction, SessionMode, SessionState, Trajectory
from proxy_ext.session import EXPORT_OWNER, REPLAY, TRANSITIONS, Session, Transitions
from proxy_ext.sessions import Sessions

log = logging.getLogger(__name__)

_UNHEARD_OF = 15.0
"""Seconds within which a trainer says that it has what it leased; else the answer was lost."""


class Leases:
    """Leases of one rank's sessions."""

    def __init__(self, sessions: Sessions, *, ttl: float) -> None:
        self._sessions = sessions
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
        for session in self._leased():
            if session.row.owner == body.owner and session.id in held:
                session.lease_expires = now + self._ttl

        def unknown(session: Session) -> bool:
            if session.row.owner == body.owner:
                return session.id not in held and session.lease_began + _UNHEARD_OF < now
            return session.row.owner != EXPORT_OWNER

        if taken := await self._give_back(unknown):
            log.info("took back %d sessions that their trainer does not hold", taken)
        return self.capacity()

    def capacity(self) -> Capacity:
        live = [s for s in self._sessions.live.values() if s.mode is SessionMode.TRAIN]
        running = sum(s.state is SessionState.OPEN for s in live)
        admission = self._sessions.admission
        return Capacity(
            admitted=admission.admitted,
            # Also those of sessions that are being written: they are neither open nor free.
            reserved=admission.admitted - self._sessions.counts.created[SessionMode.TRAIN],
            waiting=admission.waiting,
            running=running,
            buffered=len(live) - running,
            limit=admission.limit,
            queue=admission.queue,
        )

    async def lease(self, body: Lease) -> list[Trajectory]:
        """Closed groups, oldest first; waits for one up to ``wait`` seconds, then nothing."""
        if body.replay and body.session_ids is None:
            raise InvalidRequest("replay needs session_ids", param="session_ids")
        if body.session_ids is not None:
            again = self.replay if body.replay else self.lease_sessions
            return await again(body.session_ids, body.owner)
        deadline = time.monotonic() + body.wait
        ready = self._sessions.ready
        while True:
            async with self._lock:
                chosen = self._closed_groups(body.max_groups)
                if chosen:
                    return await self._take(chosen, body.owner)
            remaining = deadline - time.monotonic()
            if remaining <= 0 or self._draining:
                return []
            async with ready:
                # Looked at again under the condition's lock: a group that closed since then
                # has notified nobody.
                if not self._closed_groups(1) and not self._draining:
                    try:
                        async with asyncio.timeout(remaining):
                            await ready.wait()
                    except TimeoutError:
                        return []

    async def lease_sessions(self, session_ids: list[str], owner: str) -> list[Trajectory]:
        """These sessions; Conflict if one is not waiting to be leased."""
        async with self._lock:
            chosen = []
            for session_id in dict.fromkeys(session_ids):
                session = await self._sessions.by_id(session_id)
                ours = session.state is SessionState.LEASED and session.row.owner == owner
                if session.state is not SessionState.FINALIZED and not ours:
                    raise Conflict(
                        f"session {session_id} is {session.state}; only finalized ones can be "
                        "leased or exported",
                        code="not_finalized",
                    )
                chosen.append(session)
            return await self._take(chosen, owner)

    async def replay(self, session_ids: list[str], owner: str) -> list[Trajectory]:
        """These sessions once more, whatever a step has made of them.

        For a resume from before that step: the one way out of `trained` and `rejected`. Conflict
        naming those that no step took, or that an export holds.
        """
        async with self._lock:
            chosen = [await self._sessions.by_id(id) for id in dict.fromkeys(session_ids)]
            wrong = [
                f"{session.id} is {session.state}"
                for session in chosen
                if session.state not in REPLAY or session.row.owner == EXPORT_OWNER
            ]
            if wrong:
                raise Conflict(
                    f"{len(wrong)} sessions cannot be trained on again: {'; '.join(wrong[:8])}",
                    code="not_replayable",
                )
            return await self._take(chosen, owner, REPLAY)

    async def ack(self, body: Ack) -> int:
        """End leases for good. Sessions already in the wanted state are left so."""
        reasons = {r.session_id: r.reason for r in body.rejected}
        async with self._lock:
            trained = await self._leased_by(body.owner, body.trained, SessionState.TRAINED)
            rejected = await self._leased_by(body.owner, list(reasons), SessionState.REJECTED)
            await self._sessions.set_states(trained, SessionState.TRAINED)
            await self._sessions.set_states(rejected, SessionState.REJECTED, reasons=reasons)
        return len(trained) + len(rejected)

    async def expire(self) -> None:
        """Give back what a silent holder leased."""
        if lapsed := await self._give_back(lambda s: s.lease_expires <= time.monotonic()):
            log.warning("%d leases ran out; their sessions are handed out again", lapsed)

    def held_by(self, owner: str) -> set[str]:
        """The sessions that one holder has leased."""
        return {s.id for s in self._leased() if s.row.owner == owner}

    async def give_back(self, session_ids: list[str], owner: str) -> None:
        """End leases of one holder without an effect."""
        ids = set(session_ids)
        await self._give_back(lambda s: s.id in ids and s.row.owner == owner)

    # ------------------------------------------------------------------------------------------

    def _leased(self) -> list[Session]:
        return [s for s in self._sessions.live.values() if s.state is SessionState.LEASED]

    async def _give_back(self, ended: Callable[[Session], bool]) -> int:
        """End the leases that are ``ended``, without an effect; their number."""
        if not any(map(ended, self._leased())):
            return 0
        async with self._lock:
            # Looked at again: whoever had the lock may have leased or renewed some of them.
            chosen = [session for session in self._leased() if ended(session)]
            if chosen:
                await self._sessions.set_states(chosen, SessionState.FINALIZED)
        return len(chosen)

    def _closed_groups(self, most: int) -> list[Session]:
        """The members of up to ``most`` closed groups that wait to be leased."""
        chosen: list[Session] = []
        count = 0
        seen: set[str] = set()
        for session in self._sessions.live.values():
            if session.state is not SessionState.FINALIZED or session.mode is not SessionMode.TRAIN:
                continue
            if session.row.group_id is None:
                chosen.append(session)
                count += 1
            elif session.row.group_id not in seen:
                seen.add(session.row.group_id)
                group = self._sessions.groups.get(session.row.group_id)
                # A group is handed out whole: not while an export holds some of it.
                if group is None or not group.closed or group.has_leased:
                    continue
                chosen += [self._sessions.live[id] for id in group.finalized]
                count += 1
            if count >= most:
                break
        return chosen

    async def _take(
        self, chosen: list[Session], owner: str, transitions: Transitions = TRANSITIONS
    ) -> list[Trajectory]:
        live = self._sessions.live
        # Leased in the journal alone: the store failed in the middle of a replay.
        fresh = [
            s
            for s in chosen
            if s.state is not SessionState.LEASED or s.row.owner != owner or s.id not in live
        ]
        for session in chosen:
            # Before they are leased: a sweep must not take new leases for ones that ran out.
            session.lease_began = time.monotonic()
            session.lease_expires = session.lease_began + self._ttl
        # Shielded: a poller that leaves now must not leave the journal ahead of the memory.
        write = asyncio.ensure_future(self._hand_out(fresh, owner, transitions))
        try:
            await asyncio.shield(write)
        except asyncio.CancelledError:
            await asyncio.wait([write])
            if write.exception() is None:
                await self._sessions.set_states(fresh, SessionState.FINALIZED)
            raise
        return [trajectory(session) for session in chosen]

    async def _hand_out(
        self, sessions: list[Session], owner: str, transitions: Transitions
    ) -> None:
        ended = [session for session in sessions if session.id not in self._sessions.live]
        for session in ended:
            await self._sessions.load(session)
        await self._sessions.set_states(
            sessions, SessionState.LEASED, owner=owner, transitions=transitions
        )
        await self._sessions.revive(ended)

    async def _leased_by(
        self, owner: str, session_ids: list[str], state: SessionState
    ) -> list[Session]:
        found = []
        for session_id in dict.fromkeys(session_ids):
            session = await self._sessions.by_id(session_id)
            if session.state is state:
                continue
            if session.state is not SessionState.LEASED or session.row.owner != owner:
                raise Conflict(
                    f"session {session_id} is {session.state} and not leased by {owner}; "
                    "its lease ran out or was taken back",
                    code="lease_lost",
                )
            found.append(session)
        return found


def trajectory(session: Session) -> Trajectory:
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
