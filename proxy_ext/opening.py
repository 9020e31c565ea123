"""Opening sessions: a key's lane, a slot or a group's reservation, a row in the journal."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

from any_agent.config import SessionConfig
from any_agent.errors import Conflict, InvalidRequest, TooManyRequests, Unauthenticated
from any_agent.keys import KeySigner, Lane
from any_agent.protocol import StartSession
from any_agent.types import SessionMode, SessionState
from proxy_ext.draining import draining
from proxy_ext.groups import Group, closed_error
from proxy_ext.journal import PutSession, SessionRow
from proxy_ext.session import Session
from proxy_ext.sessions import Sessions


class Opening:
    """Opens sessions of one rank."""

    def __init__(
        self, sessions: Sessions, signer: KeySigner, config: SessionConfig, *, largest_group: int
    ) -> None:
        self._sessions = sessions
        self._signer = signer
        self._config = config
        self._largest_group = largest_group
        self._opening: set[str] = set()
        """Lanes whose session is being opened."""
        self.refused: Counter[str] = Counter()
        """Opens that were refused, by the error's code."""
        self._draining = False

    def drain(self) -> None:
        """Refuse whoever waits for a slot, at once, and whoever comes."""
        self._draining = True
        self._sessions.admission.close(draining())

    async def open(self, body: StartSession) -> tuple[Session, str]:
        """Open a session: take a slot (train), write it, answer it with its key."""
        if self._draining:
            raise draining()
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
        sessions = self._sessions
        now, wall = time.monotonic(), time.time()
        ttl = min(body.ttl or self._config.ttl, self._config.ttl)
        row = SessionRow(
            id=sessions.groups.new_member(group) if group else sessions.names.single(),
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
                await self._sessions.end(session, SessionState.ABORTED, "its opener left")
            raise
        return session, key

    async def _insert(self, session: Session, group: Group | None) -> None:
        try:
            await self._sessions.journal.commit(PutSession(session.row))
        except BaseException:
            if group is not None:
                group.promised -= 1
                self._discard_unused(group)
            elif session.mode is SessionMode.TRAIN:
                self._sessions.admission.release(1)
            raise
        self._sessions.add(session)
        if group is not None:
            group.promised -= 1
            if not group.members:
                # Its time begins now; until here it may have waited for its slots.
                group.deadline = time.monotonic() + self._config.group_timeout
            group.members[session.id] = SessionState.OPEN

    async def _lane(self, api_key: str | None) -> tuple[Lane, str]:
        if api_key is None:
            return self._signer.mint(self._sessions.rank)
        lane = self._signer.verify(api_key)
        if lane is None:
            raise Unauthenticated("api_key is not a session key of this service")
        if lane.rank != self._sessions.rank:
            raise Conflict(
                "the key belongs to another rank; open without api_key", code="lane_on_other_rank"
            )
        current = await self._sessions.by_lane(lane.id)
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
        wait = min(body.wait, self._config.max_wait)
        if body.group_id is None and body.task_id is None:
            if body.group_size not in (None, 1):
                raise InvalidRequest("group_size needs a group_id or a task_id", param="group_size")
            ticket = self._sessions.admission.ask(1)
            try:
                granted = await ticket.wait(wait)
            except asyncio.CancelledError:
                self._sessions.admission.withdraw(ticket)
                raise
            if not granted:
                self._sessions.admission.withdraw(ticket)
                if body.api_key is not None:
                    # Only this rank will do.
                    self._sessions.admission.remember(body.api_key, 1)
                raise self._no_slot()
            return None
        return await self._admit_member(body, wait)

    async def _admit_member(self, body: StartSession, wait: float) -> Group:
        size = body.group_size or self._config.group_size
        if size > self._largest_group:
            raise InvalidRequest(
                f"group_size {size} exceeds {self._largest_group}, the lesser of the run's "
                "batch_size and max_concurrent: such a group could never be admitted",
                param="group_size",
            )
        groups, deadline = self._sessions.groups, time.monotonic() + wait
        if body.group_id is not None and groups.get(body.group_id) is None:  # noqa: SIM102
            if await self._sessions.journal.group(body.group_id):
                raise closed_error(body.group_id)
        while True:
            group = groups.joinable(group_id=body.group_id, task_id=body.task_id, size=size)
            await self._wait_for(group, deadline - time.monotonic())
            if not group.closed and group.room > 0:
                group.promised += 1
                return group
            if body.group_id is not None:
                raise closed_error(group.id)
            # Others were first; the task's next generation begins.

    async def _wait_for(self, group: Group, seconds: float) -> None:
        """Return once the group has its slots; TooManyRequests if none came in time."""
        if group.ticket is None and not group.members:
            try:
                group.ticket = self._sessions.admission.ask(group.size)
            except TooManyRequests:
                self._sessions.groups.discard(group)
                raise
        group.openers += 1
        granted = False
        try:
            granted = group.ticket is None or await group.ticket.wait(seconds)
        finally:
            group.openers -= 1
            if not granted:
                self._discard_unused(group)
        if not granted:
            raise self._no_slot()
        self._sessions.admission.forget(group.key)

    def _discard_unused(self, group: Group) -> None:
        """Give back the slots (or the place) of a group that nobody got into."""
        if group.ticket is not None and group.unused:
            if not group.ticket.granted:
                self._sessions.admission.remember(group.key, group.size)
            self._sessions.admission.withdraw(group.ticket)
            self._sessions.groups.discard(group)

    def _no_slot(self) -> TooManyRequests:
        message = (
            "no slot for a train session is free: the trainer has as many as it wants now; "
            "try again later, or pass `wait` (seconds) to wait for one"
        )
        partial = next((g for g in self._sessions.groups.all() if g.members and g.room > 0), None)
        if partial is not None:
            message += (
                f". {self._sessions.groups.reserved} slots are kept for groups that are not full: "
                f"{partial.id} has {len(partial.members)} of {partial.size} sessions"
            )
        return TooManyRequests(message, retry_after=2)
