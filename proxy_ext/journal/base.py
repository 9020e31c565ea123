"""The journal's interface: any store that keeps a rank's sessions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from any_agent.runtime.metrics import Histogram
from any_agent.types import SessionState
from proxy_ext.journal.rows import (
    AnswerRow,
    NumberedRow,
    RewardRow,
    SessionFilter,
    SessionPage,
    SessionRow,
    StoredInteraction,
    StoredRequest,
)
from proxy_ext.journal.statements import Statement

COMMIT_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class JournalStats:
    """What the store's writes cost; written by its thread, read by whoever asks."""

    def __init__(self) -> None:
        self.writes = 0
        """Writes that were committed; one commit may carry many."""
        self.commit_seconds = Histogram(COMMIT_BOUNDS)
        self.full = False
        """The disk has no room: the last write was refused for that."""
        self.damaged = 0
        """Sessions that were ended because the journal had lost some of theirs, since the start."""


class Journal(Protocol):
    """One rank's store. Reads are of committed data only."""

    stats: JournalStats

    async def commit(self, *statements: Statement) -> None:
        """Write all of them durably or none; StoreUnavailable if the store cannot.

        StoreBusy, which is one, says that it was not begun; StoreFull that the disk has no room and
        nothing was written; after another one a crash may show that it was written all the same.
        """
        ...

    async def sessions(self, states: Iterable[SessionState]) -> list[SessionRow]:
        """Sessions in any of the states, in the order of their creation."""
        ...

    async def session_of_lane(self, lane: str) -> SessionRow | None:
        """The newest session of a lane."""
        ...

    async def session(self, session_id: str) -> SessionRow | None:
        """One session, whatever its state."""
        ...

    async def group(self, group_id: str) -> list[SessionRow]:
        """Every member that a group ever had, in the order of their creation."""
        ...

    async def group_ids(self) -> list[str]:
        """Every group that ever had a member."""
        ...

    async def unfilled_groups(self, since: float, *, left: str) -> list[str]:
        """Groups to which fewer members than their size were added since then (epoch seconds).

        Those with the owner ``left`` do not count: they gave their places back.
        """
        ...

    async def last_session(self, prefix: str) -> str | None:
        """The last session's id, in the order of ids, of those that begin with this."""
        ...

    async def last_number(self, prefix: str) -> int | None:
        """The highest whole number that follows this prefix, and nothing after it, in an id."""
        ...

    async def counts(self) -> dict[tuple[str, SessionState], int]:
        """How many sessions there are of each mode in each state."""
        ...

    async def ended(
        self, *, before: float, oldest_step: int | None, limit: int
    ) -> list[NumberedRow]:
        """Ended sessions whose content no resume can need, the oldest first.

        Those that ended before then (seconds since the epoch), are still stored and, where an
        optimizer step consumed them, whose step the oldest checkpoint holds.
        """
        ...

    async def page(self, wanted: SessionFilter, *, before: int | None, limit: int) -> SessionPage:
        """Sessions with lower numbers than ``before``, newest first.

        It looks at a bounded number of them, so that a page may be short, or empty, and yet not be
        the last one.
        """
        ...

    async def number(self, session_id: str) -> int | None:
        """The session's place in the order of creation."""
        ...

    async def interactions(self, session_id: str) -> list[StoredInteraction]:
        """In the order of their first commit: parents before children."""
        ...

    async def session_of_interaction(self, interaction_id: str) -> str | None:
        """Whose it is; None for one that is not here, or not any more."""
        ...

    async def requests(self, session_id: str) -> list[StoredRequest]:
        """The marked requests of a session's interactions, in their order."""
        ...

    async def rewards(self, session_id: str, *, last: int | None = None) -> list[RewardRow]:
        """Every reward that was ever set, or the last ones, in the order in which they were."""
        ...

    async def reward_parts(
        self, session_id: str, interaction_id: str | None
    ) -> tuple[dict[str | None, float], int]:
        """What an interaction's reward (None: the session's) is made of, by name, and how many
        rewards the session was ever given."""
        ...

    async def answer(self, scope: str, key: str) -> AnswerRow | None:
        """What the request with this idempotency key was answered."""
        ...

    async def meta(self, key: str) -> Any:
        """A named value, or None."""
        ...

    async def trim(self) -> int:
        """Give some of the space that removed content left back to the file system; the bytes that
        are still free."""
        ...

    def size(self) -> int:
        """The bytes that it takes on disk."""
        ...

    async def close(self) -> None: ...
