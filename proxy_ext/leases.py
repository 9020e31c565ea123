"""Leases of finalized trajectories to the trainer, and the fence against earlier starts of it.

Only closed groups are leased. A lease ends by an ack, by its owner's silence, or when another start
of the trainer appears.

Each start of the trainer has a number (`trainer.epoch` in the run's folder). A rank's journal has
the highest number that it has seen; a trainer with a lower one can neither lease nor publish,
however long it was away, also after the rank's restart. A person's requests have no number.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable

from any_agent.auth.access import RUN
from any_agent.errors import Conflict, InvalidRequest, SessionClosed, SessionDamaged, StaleOwner
from any_agent.protocol.training import Ack, Capacity, Lease, SetCapacity
from any_agent.types import Interaction, SessionState, Trajectory
from proxy_ext.journal import Journal, PutMeta, SessionRow
from proxy_ext.journal.base import (
    EXPORT_OWNER,
    GRANT_OWNER,
    RewardRow,
    for_export,
    handed_out,
    holds,
)
from proxy_ext.sessions.endings import SessionEnder
from proxy_ext.sessions.rewards import named_rewards
from proxy_ext.sessions.session import RecordedSession
from proxy_ext.sessions.session_store import SessionStore
from proxy_ext.sessions.state_machine import Event, allowed, refusal, target

log = logging.getLogger(__name__)

_EPOCH = "trainer_epoch"
_UNCLAIMED = "its trainer ended before it had it"
CONFIRM_TIMEOUT = 15.0
"""Seconds within which a trainer confirms a new lease; after that its answer counts as lost."""
ANSWER_BYTES = 64 * 2**20
"""Estimated size of one poll's answer at most, unless a single group is larger."""
_SHOWN_GROUPS = 8
_BUFFERED = (SessionState.AWAITING_REWARD, SessionState.FINALIZED, SessionState.LEASED)


class Fence:
    """Checks requests against the latest start of the trainer that this rank has seen."""

    def __init__(
        self, journal: Journal, on_takeover: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """``on_takeover`` is called once for each later start, before it is served."""
        self._journal = journal
        self._on_takeover = on_takeover
        self._lock = asyncio.Lock()
        self.epoch = 0

    async def recover(self) -> None:
        """Load the latest start's number from the journal."""
        self.epoch = await self._journal.meta(_EPOCH) or 0

    async def admit(self, epoch: int | None) -> None:
        """Admit a request of this start; StaleOwner if it is not the latest one.

        The number of a later start is durable before its first request is served.
        """
        if epoch is not None and epoch > self.epoch:
            async with self._lock:
                if epoch > self.epoch:
                    if self._on_takeover is not None:
                        await self._on_takeover()
                    await self._journal.commit(PutMeta(_EPOCH, epoch))
                    self.epoch = epoch
        self.check(epoch)

    def check(self, epoch: int | None) -> None:
        """Raise StaleOwner if a later start has taken over."""
        if epoch is not None and epoch < self.epoch:
            raise StaleOwner(
                f"start {self.epoch} of the trainer has taken over from start {epoch}, which must "
                "end; if it is in fact the latest, start it again, and it gets a higher number"
            )


async def drop_leftovers(sessions: SessionStore, endings: SessionEnder) -> None:
    """Revoke the unused grants of the run's trainer, and end the sessions that it opened on grants:
    open ones are aborted, finalized ones rejected.

    An earlier start that ran agents on a dataset left them; the next start repeats its items.
    """
    await sessions.run_grants.withdraw()
    left = [
        session
        for session in sessions.live.values()
        if session.row.owner == GRANT_OWNER and session.row.opened_by == RUN.name
    ]
    for session in left:
        try:
            if session.state is SessionState.FINALIZED:
                await endings.veto(session, _UNCLAIMED)
            else:
                await endings.abort(session, _UNCLAIMED)
        except (Conflict, SessionClosed):
            # The session ended meanwhile.
            continue
    if left:
        log.info("%d sessions of an earlier start of the trainer were ended", len(left))


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
        """``needed`` tells whether a resume may need a session that a trainer has given back."""
        self._sessions = sessions
        self._needed = needed
        self._lease_index = sessions.lease_index
        self._fence = fence
        self._ttl = ttl
        self._lock = asyncio.Lock()
        self._last_message: tuple[str, int] = ("", 0)
        """The owner and the number of the last capacity message."""
        self._draining = False

    async def drain(self) -> None:
        """Answer long polls at once, from now on."""
        self._draining = True
        async with self._sessions.ready:
            self._sessions.ready.notify_all()

    async def set_capacity(self, body: SetCapacity) -> Capacity:
        """Set the cap, renew the owner's leases, and take back those that it does not know of.

        These are an earlier trainer's, and those whose answer was lost.
        """
        owner, number = self._last_message
        if body.owner == owner and body.number < number:
            return self.capacity()
        self._last_message = (body.owner, body.number)
        # Set the cap first: the rest may wait, and must not undo a later message.
        self._sessions.admission.set_limit(body.limit, body.ttl)
        known = set(body.held)
        now = time.monotonic()
        for session in self._lease_index.leased:
            if session.row.owner == body.owner and session.id in known:
                session.lease_expires = now + self._ttl

        def unknown(session: RecordedSession) -> bool:
            if session.row.owner == body.owner:
                return session.id not in known and session.lease_began + CONFIRM_TIMEOUT < now
            return not for_export(session.row)

        if number_taken := await self._give_back(unknown):
            log.info(
                "took back %d leased sessions that their trainer did not confirm", number_taken
            )
        return self.capacity()

    def capacity(self) -> Capacity:
        counts, admission = self._sessions.counts, self._sessions.admission
        return Capacity(
            admitted=admission.admitted,
            # With those of sessions that are being written: these are neither open nor free.
            reserved=self._sessions.reserved,
            waiting=admission.waiting,
            # Sessions opened on grants neither take a trainer's slots nor fill its batches, however
            # late they are exported.
            running=counts.for_trainer(SessionState.OPEN),
            buffered=counts.for_trainer(*_BUFFERED),
            limit=admission.limit,
            queue=admission.queue,
            unfilled=self._sessions.groups.first_unfilled(_SHOWN_GROUPS),
            grants=self._sessions.grants.left + self._sessions.run_grants.left,
        )

    async def lease(self, body: Lease, *, epoch: int | None = None) -> list[Trajectory]:
        """Lease closed groups, oldest first; wait for one up to ``wait`` seconds.

        Return nothing if none closed. StaleOwner if a later start of the trainer than ``epoch``
        appeared meanwhile.
        """
        if body.owner == GRANT_OWNER:
            raise InvalidRequest(
                f"the owner {GRANT_OWNER!r} is reserved; choose another name", param="owner"
            )
        if body.replay and body.session_ids is None:
            raise InvalidRequest("replay needs session_ids; name the sessions", param="session_ids")
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
                        return await self._lease(await self._fitting(groups), body.owner)
                    except (Conflict, SessionClosed):
                        # A member was vetoed or deleted meanwhile, which the next round sees.
                        continue
            remaining = deadline - time.monotonic()
            if remaining <= 0 or self._draining:
                return []
            async with ready:
                # Checked again under the condition's lock: a group may have closed since then.
                if not self._lease_index.first(1) and not self._draining:
                    try:
                        async with asyncio.timeout(remaining):
                            await ready.wait()
                    except TimeoutError:
                        return []

    async def lease_sessions(self, session_ids: list[str], owner: str) -> list[Trajectory]:
        """Lease these sessions; Conflict if one is not there to be leased by this owner."""
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
                    # A trainer may need it again: an export must not change it meanwhile.
                    raise refusal(session.row, Event.LEASE)
                chosen.append(session)
            return await self._lease(chosen, owner)

    async def replay(self, session_ids: list[str], owner: str) -> list[Trajectory]:
        """Lease these sessions once more, whatever a step has made of them.

        This is for a resume from before that step: the one way out of `trained` and `rejected`.
        Conflict for sessions that no step took, that an export leases, or whose content is gone.
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
            return await self._lease(chosen, owner, Event.REPLAY)

    async def ack(self, body: Ack) -> int:
        """End leases for good, and return their number. Repeated acks change nothing."""
        reasons = {r.session_id: r.reason for r in body.rejected}
        async with self._lock:
            trained = await self._to_change(body.owner, body.trained, Event.TRAIN)
            rejected = await self._to_change(body.owner, list(reasons), Event.REJECT)
            move, by, step = self._sessions.move, body.owner, body.step
            await move(trained, Event.TRAIN, owner=by, step=step)
            await move(rejected, Event.REJECT, reasons=reasons, owner=by, step=step)
        return len(trained) + len(rejected)

    async def expire(self) -> None:
        """Give back the leases of silent owners."""
        if lapsed := await self._give_back(lambda s: s.lease_expires <= time.monotonic()):
            log.warning("%d leases ran out; their sessions can be leased again", lapsed)

    def leased_by(self, owner: str) -> set[str]:
        return {s.id for s in self._lease_index.leased if holds(s.row, owner)}

    async def give_back(self, session_ids: list[str], owner: str) -> None:
        """End leases of one owner without an effect."""
        ids = set(session_ids)
        await self._give_back(lambda s: s.id in ids and holds(s.row, owner))

    async def _give_back(self, ended: Callable[[RecordedSession], bool]) -> int:
        """End the leases that are ``ended`` without an effect, and return their number."""
        if not any(map(ended, self._lease_index.leased)):
            return 0
        async with self._lock:
            # Checked again: some may have been leased or renewed while this waited for the lock.
            chosen = [session for session in self._lease_index.leased if ended(session)]
            if chosen:
                await self._sessions.move(chosen, Event.RELEASE)
        return len(chosen)

    async def _fitting(self, groups: list[list[RecordedSession]]) -> list[RecordedSession]:
        """Return the members of the first groups that fit into one answer."""
        chosen: list[RecordedSession] = []
        size = 0
        for members in groups:
            try:
                for session in members:
                    await self._sessions.load(session)
                    size += sum(map(_bytes, session.tree))
            except SessionDamaged:
                # The session is being ended; its group is leased without it.
                continue
            if chosen and size > ANSWER_BYTES:
                break
            chosen += members
        return chosen

    async def _lease(
        self, chosen: list[RecordedSession], owner: str, event: Event = Event.LEASE
    ) -> list[Trajectory]:
        live = self._sessions.live
        # `s.id not in live`: leased in the journal alone, as the store failed during a replay.
        fresh = [
            s
            for s in chosen
            if s.state is not SessionState.LEASED or not holds(s.row, owner) or s.id not in live
        ]
        for session in chosen:
            # Set before the lease: a sweep must not take new leases for expired ones.
            session.lease_began = time.monotonic()
            session.lease_expires = session.lease_began + self._ttl
        # Shielded: if the poller leaves now, memory and journal must still agree.
        write = asyncio.ensure_future(self._hand_out(fresh, owner, event))
        try:
            await asyncio.shield(write)
        except asyncio.CancelledError:
            await asyncio.wait([write])
            if write.exception() is None:
                await self._sessions.move(fresh, Event.RELEASE)
            raise
        # At once: the journal answers the reads that wait together.
        given = await asyncio.gather(*(self._sessions.journal.rewards(s.id) for s in chosen))
        out = []
        for session, rewards in zip(chosen, given, strict=True):
            await self._sessions.load(session)
            out.append(trajectory(session, rewards))
        return out

    async def _hand_out(self, sessions: list[RecordedSession], owner: str, event: Event) -> None:
        ended = [session for session in sessions if session.id not in self._sessions.live]
        for session in ended:
            await self._sessions.load(session)
        groups = await self._sessions.groups_of(ended)
        await self._sessions.move(sessions, event, owner=owner)
        self._sessions.revive(ended, groups)

    async def _to_change(
        self, owner: str, session_ids: list[str], event: Event
    ) -> list[RecordedSession]:
        """Return the sessions that the event still changes; Conflict for one leased to another."""
        found = []
        for session_id in dict.fromkeys(session_ids):
            session = await self._sessions.by_id(session_id)
            if target(session.row, event) is session.state:
                continue
            if not holds(session.row, owner):
                raise Conflict(
                    f"session {session_id} is not leased by {owner}; its lease ran out or was "
                    "taken back: lease it again",
                    code="lease_lost",
                    details={"state": str(session.state)},
                )
            found.append(session)
        return found


def _bytes(interaction: Interaction) -> int:
    """Return the estimated size on the wire: arrays, and texts of a few bytes a token."""
    return 16 * (len(interaction.prompt_delta_ids) + len(interaction.output_ids))


def trajectory(session: RecordedSession, rewards: Iterable[RewardRow] = ()) -> Trajectory:
    """Return a session as the trainer receives it; ``rewards`` is its whole history of them."""
    interactions: list[Interaction] = list(session.tree)
    row = session.row
    return Trajectory(
        session_id=row.id,
        group_id=row.group_id or row.id,
        interactions=interactions,
        final_reward=row.final_reward,
        task_id=row.task_id,
        metadata=row.metadata,
        named_rewards=named_rewards(row, rewards),
    )
