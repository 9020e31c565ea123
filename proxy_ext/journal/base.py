"""The interface of journals, and the registry of their kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeAlias
from urllib.parse import urlsplit

from any_agent.errors import ConfigError
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
    """Counters of a journal, written by its thread and read by any other."""

    def __init__(self) -> None:
        self.writes = 0
        """Number of committed writes; one commit may carry many."""
        self.commit_seconds = Histogram(COMMIT_BOUNDS)
        self.full = False
        """The disk had no room for the last write."""
        self.damaged = 0
        """Number of sessions ended because the journal had lost some of their data."""


class Journal(Protocol):
    """One rank's store. Reads are of committed data only."""

    stats: JournalStats

    async def commit(self, *statements: Statement) -> None:
        """Write all statements durably or none; StoreUnavailable if the store cannot.

        Its subclass StoreBusy means that the write was not started, StoreFull that the disk has no
        room and nothing was written. After any other StoreUnavailable the statements may turn out
        to be written after a crash.
        """

    async def sessions(self, states: Iterable[SessionState]) -> list[SessionRow]:
        """Return the sessions in any of the states, in the order of their creation."""

    async def session_of_lane(self, lane: str) -> SessionRow | None:
        """Return the newest session of a lane."""

    async def session(self, session_id: str) -> SessionRow | None:
        """Return one session, whatever its state."""

    async def group(self, group_id: str) -> list[SessionRow]:
        """Return every member that a group ever had, in the order of their creation."""

    async def group_ids(self) -> list[str]:
        """Return the id of every group that ever had a member."""

    async def unfilled_groups(self, since: float, *, left: str) -> list[str]:
        """Return the groups that got fewer members than their size since then (epoch seconds).

        Members with the owner ``left`` do not count: they gave up their places.
        """

    async def last_session(self, prefix: str) -> str | None:
        """Return the greatest session id with this prefix."""

    async def last_number(self, prefix: str) -> int | None:
        """Return the highest number N of which the prefix followed by N is a session id."""

    async def counts(self) -> dict[tuple[str, SessionState], int]:
        """Return the number of sessions by mode and state."""

    async def ended(
        self, *, before: float, oldest_step: int | None, limit: int
    ) -> list[NumberedRow]:
        """Return ended sessions whose content no resume can need, the oldest first.

        They ended before then (seconds since the epoch), their content is stored, and if an
        optimizer step consumed them, the oldest checkpoint includes that step.
        """

    async def page(self, wanted: SessionFilter, *, before: int | None, limit: int) -> SessionPage:
        """Return sessions with lower numbers than ``before``, newest first.

        It scans a bounded number of them, so that a page may be short or empty without being the
        last one.
        """

    async def number(self, session_id: str) -> int | None:
        """Return the session's number in the order of creation."""

    async def interactions(self, session_id: str) -> list[StoredInteraction]:
        """Return a session's interactions in the order of their first commit: parents first.

        SessionDamaged if some are missing or changed.
        """

    async def session_of_interaction(self, interaction_id: str) -> str | None:
        """Return the session of an interaction; None for one that is not stored."""

    async def requests(self, session_id: str) -> list[StoredRequest]:
        """Return the marked requests of a session's interactions, in their order."""

    async def rewards(self, session_id: str, *, last: int | None = None) -> list[RewardRow]:
        """Return every reward that was ever set, or the last ones, in their order."""

    async def reward_parts(
        self, session_id: str, interaction_id: str | None
    ) -> tuple[dict[str | None, float], int]:
        """Return the parts of an interaction's reward (None: the session's) by name, and the number
        of rewards that the session was ever given."""

    async def answer(self, scope: str, key: str) -> AnswerRow | None:
        """Return the answer to the request with this idempotency key."""

    async def meta(self, key: str) -> Any:
        """Return a named value, or None."""

    async def trim(self) -> int:
        """Give some free space back to the file system; return the bytes that are still free."""

    async def retry_full(self) -> None:
        """Try a write if the disk was full and may have room now; otherwise do nothing."""

    def size(self) -> int:
        """Return the bytes that it takes on disk."""

    async def close(self) -> None: ...


JournalOpener: TypeAlias = Callable[[str], Journal]
"""Opens or creates the journal at a URL; StartupError if it cannot be used."""
_OPENERS: dict[str, JournalOpener] = {}


def register_journal(scheme: str, opener: JournalOpener) -> None:
    """Let :func:`open_journal` open URLs of a scheme."""
    _OPENERS[scheme] = opener


def open_journal(url: str) -> Journal:
    """Open or create the journal at a URL, such as `sqlite:///run/journal/rank-0.sqlite`.

    Raises:
        ConfigError: no journal is registered for the URL's scheme.
        StartupError: the journal cannot be used; the message says what to do.
    """
    scheme = urlsplit(url).scheme
    if scheme not in _OPENERS:
        known = ", ".join(sorted(_OPENERS))
        raise ConfigError(
            f"there is no journal for {scheme}:// (known: {known}); call register_journal first"
        )
    return _OPENERS[scheme](url)
