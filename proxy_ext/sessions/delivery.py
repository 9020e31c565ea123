"""Which recorded answers reached their agents: what did not is never trained on.

An answer is recorded before its end is sent, and marked as delivered once that was handed to a
client that is there. The mark is written a moment later, with whatever else is, and costs no fsync.
So a process that dies may take the marks of its last moment with it, and a machine those since the
last other write. What an earlier process left without a mark counts as received only if something
came of it: it was continued, rewarded by name, or asked for again by a marked retry. What was not
when its session is finalized counts as undelivered, also if its agent did have it, and never the
other way round.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

from any_agent.errors import StoreUnavailable
from any_agent.record import was_received
from any_agent.types import Interaction, SessionState
from proxy_ext.journal import Journal, MarkDelivered, RequestMark, Statement
from proxy_ext.sessions.session import RecordedSession

UNDELIVERED = "undelivered"
_MOMENT = 0.01
"""Seconds. A write of its own for each mark would be a tenth of what a recorded call costs."""
UNMARKED = RequestMark(b"", 0)
"""Of a request whose SDK does not mark retries: no retry finds its answer."""


def undelivered(interaction: Interaction) -> Interaction:
    """As it is recorded when its answer reached nobody."""
    return replace(interaction, untrainable_reason=UNDELIVERED)


class DeliveryTracker:
    """The marks that are still to be written."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._unwritten: list[str] = []
        self._writing: asyncio.Task[None] | None = None

    def mark_delivered(self, interaction_id: str) -> None:
        """Its client has the answer."""
        self._unwritten.append(interaction_id)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())

    async def load(self, session: RecordedSession) -> None:
        """Find out which of a session's answers are not known to have reached its agent."""
        if session.state in (SessionState.OPEN, SessionState.AWAITING_REWARD):
            session.unconfirmed = {
                request.interaction_id: request.mark
                for request in await self._journal.requests(session.id)
                if not request.delivered and request.interaction_id not in self._unwritten
            }
        session.recovered = False

    async def commit(self, *statements: Statement) -> None:
        """Write these, and the marks with them."""
        marks, self._unwritten = self._unwritten, []
        try:
            if marks:
                statements = (*statements, MarkDelivered(tuple(marks)))
            if statements:
                await self._journal.commit(*statements)
        except BaseException:
            self._unwritten += marks
            raise

    async def flush(self) -> None:
        """Write the marks that are left: the store had failed, or this is the end."""
        if self._unwritten:
            await self.commit()

    async def _write(self) -> None:
        with suppress(StoreUnavailable):
            while self._unwritten:
                # Those of one moment share a write, often one that is made anyway.
                await asyncio.sleep(_MOMENT)
                await self.flush()


def unreceived(session: RecordedSession, *, for_good: bool) -> list[Interaction]:
    """The recorded answers of a session that its agent is not known to have.

    ``for_good``: nothing can show any more that it has those of an earlier process.
    """
    cut = [session.tree[id] for id in session.unconfirmed if for_good and id in session.tree]
    return [
        i
        for i in (*_unsent(session), *cut)
        if i.untrainable_reason != UNDELIVERED and not was_used(session, i)
    ]


def last_received(session: RecordedSession) -> Interaction | None:
    """The latest interaction whose answer went out, which a reward without an id means."""
    unsent = {i.id for i in _unsent(session)}
    newest_first = reversed(list(session.tree))
    return next((i for i in newest_first if was_received(i) and i.id not in unsent), None)


def was_used(session: RecordedSession, interaction: Interaction) -> bool:
    """Whether the agent showed that it has the answer."""
    return interaction.reward is not None or bool(session.tree.children(interaction.id))


def _unsent(session: RecordedSession) -> list[Interaction]:
    return [interaction for call in session.calls for interaction in call.undelivered]
