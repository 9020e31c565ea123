"""Delivery of recorded answers to their agents: an undelivered answer is never trained on.

An answer is recorded before its end is sent, and marked as delivered once the end was handed to a
connected client. The mark is written a moment later, together with other writes, and costs no
fsync. So a process that dies may lose the marks of its last moment, and a machine those since the
last other write. An answer that an earlier process left unmarked counts as received only if it was
used: continued, rewarded by name, or fetched by a marked retry. The service's own grader does not
use an answer: it names what is recorded. One that was not used when its session is finalized counts
as undelivered, even if its agent did have it, and never the other way round.
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
BATCH_SECONDS = 0.01
"""Delay of a write of marks. A write for each mark would be a tenth of a recorded call's cost."""
UNMARKED = RequestMark(b"", 0)
"""The mark of a request whose SDK does not mark retries: no retry finds its answer."""


def undelivered(interaction: Interaction) -> Interaction:
    """Return the interaction as it is recorded when its answer reached no client."""
    return replace(interaction, untrainable_reason=UNDELIVERED)


class DeliveryTracker:
    """Writes the delivery marks of a rank's interactions."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._unwritten: list[str] = []
        self._writing: asyncio.Task[None] | None = None

    def mark_delivered(self, interaction_id: str) -> None:
        """Mark an answer as delivered, with the next write."""
        self._unwritten.append(interaction_id)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())

    async def load(self, session: RecordedSession) -> None:
        """Load the answers of a recovered session that are not known to have reached its agent."""
        if session.state in (SessionState.OPEN, SessionState.AWAITING_REWARD):
            session.unconfirmed = {
                request.interaction_id: request.mark
                for request in await self._journal.requests(session.id)
                if not request.delivered and request.interaction_id not in self._unwritten
            }
        session.recovered = False

    async def commit(self, *statements: Statement) -> None:
        """Write the statements, and all waiting marks with them."""
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
        """Write the marks that wait, after a failure of the store or at the end."""
        if self._unwritten:
            await self.commit()

    async def _write(self) -> None:
        with suppress(StoreUnavailable):
            while self._unwritten:
                # Marks that come close together share a write, often one for other statements.
                await asyncio.sleep(BATCH_SECONDS)
                await self.flush()


def unreceived(session: RecordedSession, *, for_good: bool) -> list[Interaction]:
    """Return the recorded answers of a session that its agent is not known to have.

    ``for_good``: answers of an earlier process count as well, since no retry can fetch them now.
    """
    unconfirmed = [
        session.tree[id] for id in session.unconfirmed if for_good and id in session.tree
    ]
    return [
        i
        for i in (*_unsent(session), *unconfirmed)
        if i.untrainable_reason != UNDELIVERED and not was_used(session, i)
    ]


def last_received(session: RecordedSession) -> Interaction | None:
    """Return the latest delivered interaction, which a reward without an id is meant for."""
    unsent = {i.id for i in _unsent(session)}
    newest_first = reversed(list(session.tree))
    return next((i for i in newest_first if was_received(i) and i.id not in unsent), None)


def was_used(session: RecordedSession, interaction: Interaction) -> bool:
    """Return whether the agent has shown that it received the answer."""
    return interaction.reward is not None or bool(session.tree.children(interaction.id))


def _unsent(session: RecordedSession) -> list[Interaction]:
    return [interaction for call in session.calls for interaction in call.undelivered]
