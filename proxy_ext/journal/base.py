"""The contract of journals: their methods, the rows they return and the statements they take.

A journal is opened by its URL; :func:`register_journal` adds a kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias
from urllib.parse import urlsplit

from pydantic import BaseModel

from any_agent.errors import ConfigError
from any_agent.protocol.rl import Rewards
from any_agent.runtime.metrics import Histogram
from any_agent.types import Interaction, SessionState

IMPLICITLY = "implicit: "
"""Prefix of ``opened_by`` in sessions that a model call opened; no caller's name begins with it."""


Rewarder: TypeAlias = Rewards | Literal["grader", "operator"]
"""The source of a session's rewards: as its opening names it, or, of kind `judge`, the service's
own grader because the opening named none, or that grader without the opening tenant."""


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A session as it is stored; times are seconds since the epoch."""

    id: str
    lane: str
    mode: str
    state: SessionState
    task_id: str | None
    group_id: str | None
    """The id of the group's generation; None for a session without a group."""
    group_size: int
    metadata: dict[str, Any]
    created_at: float
    expires_at: float
    final_reward: float | None = None
    reason: str | None = None
    owner: str | None = None
    """The trainer or export that has or had the lease; GRANT_OWNER after an open on a grant."""
    tenant: str | None = None
    opened_by: str | None = None
    """The name of the key that opened the session."""
    pinned_version: int | None = None
    """The only weight version that may sample tokens; None: any."""
    clock: str | None = None
    """The boot's id and the boot clock's seconds at the opening."""
    awaits_until: float | None = None
    """The deadline of the awaited rewards."""
    step: int | None = None
    """The optimizer step that consumed the session."""
    ended_at: float | None = None
    rewarded_by: Rewarder = "agent"
    """The source of its rewards."""
    content: Literal["stored", "archived", "deleted"] = "stored"
    """The store that has the interactions: the journal, an archive, or none."""

    @property
    def implicit(self) -> bool:
        """True if a model call opened the session."""
        return self.opened_by is not None and self.opened_by.startswith(IMPLICITLY)


@dataclass(frozen=True, slots=True)
class NumberedRow:
    """A session with its number in the order of creation."""

    number: int
    row: SessionRow
    interactions: int = 0
    """Number of the session's interactions, which not every read counts."""
    rewards_given: int = 0
    """Number of the session's rewards, which not every read counts."""
    interaction_reward: float | None = None
    """Sum of its interactions' own rewards, which not every read has; None without any."""


@dataclass(frozen=True, slots=True)
class SessionFilter:
    """A choice of sessions; a field that is None matches all."""

    state: SessionState | None = None
    task_id: str | None = None
    group_id: str | None = None
    tenant: str | None = None
    min_reward: float | None = None
    """The least reward: the sum of the final one and the calls' own."""
    max_reward: float | None = None
    """The greatest reward."""
    reason: str | None = None
    """A part of the reason, in any case."""
    created_after: float | None = None
    """The earliest opening, seconds since the epoch."""
    created_before: float | None = None
    mode: str | None = None


@dataclass(frozen=True, slots=True)
class SessionPage:
    """A page of sessions, newest first."""

    rows: list[NumberedRow]
    before: int | None
    """Upper bound of the numbers on the next page; None: this is the last page."""


@dataclass(frozen=True, slots=True)
class RequestMark:
    """Identifies the request that an interaction answers, so that a retry finds the answer."""

    hash: bytes
    retry_count: int


@dataclass(frozen=True, slots=True)
class StoredInteraction:
    """An interaction and the key stored with it."""

    interaction: Interaction
    key: bytes | None
    """The chain key by which continuations find the interaction; None: it was not stored."""


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """The request that an interaction answered."""

    interaction_id: str
    mark: RequestMark
    delivered: bool


@dataclass(frozen=True, slots=True)
class RewardRow:
    """One reward as it was set, also if a later one replaced it."""

    interaction_id: str | None
    """None: the session's final reward."""
    name: str | None
    value: float | None
    """None: words alone, which are no reward."""
    by: str
    at: float
    """Seconds since the epoch."""
    text: str | None = None
    """A user's words with it."""


@dataclass(frozen=True, slots=True)
class AnswerRow:
    """The stored answer to an idempotent request."""

    scope: str
    key: str
    request_hash: bytes
    status: int
    body: bytes
    created_at: float
    """Seconds of `IdempotencyStore.now`."""


EXPORT_OWNER = "export"
"""Owner of what `export_trajectories` leased; a trainer does not take these back."""
GRANT_OWNER = "grant"
"""Owner of sessions that were opened on a grant: only exports get them, polls never."""
NO_PLACE = "no-place"
"""Owner of sessions aborted with `keep_place`, which left their groups' places to others."""


def handed_out(row: SessionRow) -> bool:
    """Return whether a session waits again after a trainer has had it.

    A step that was killed before its ack may have taken it: a resume repeats that step as it was,
    so the session must not change.
    """
    return row.state is SessionState.FINALIZED and row.owner not in (None, GRANT_OWNER)


def for_export(row: SessionRow) -> bool:
    """Return whether an export has the session, or only an export may have it."""
    return row.owner in (EXPORT_OWNER, GRANT_OWNER)


def holds(row: SessionRow, owner: str) -> bool:
    """Return whether this owner has the session's lease, if it is leased."""
    return row.owner == owner or (owner == EXPORT_OWNER and row.owner == GRANT_OWNER)


@dataclass(frozen=True, slots=True)
class PutSession:
    """Insert a session; an id that exists fails, so that nothing is ever overwritten."""

    row: SessionRow


@dataclass(frozen=True, slots=True)
class SetState:
    """Move sessions to a state. Reason, owner, step and end are set as given, None included."""

    session_ids: tuple[str, ...]
    state: SessionState
    reason: str | None = None
    owner: str | None = None
    step: int | None = None
    """The optimizer step that consumed them."""
    at: float | None = None
    """Time of their end, seconds since the epoch; None for a state that is not terminal."""


@dataclass(frozen=True, slots=True)
class SetAwaiting:
    """Let a session take rewards, but no calls, until then (seconds since the epoch)."""

    session_id: str
    until: float


@dataclass(frozen=True, slots=True)
class PutInteraction:
    """Insert or replace an interaction; None leaves its stored key or mark as it is."""

    interaction: Interaction
    key: bytes | None = None
    """The chain key by which continuations find it."""
    request: RequestMark | None = None


@dataclass(frozen=True, slots=True)
class SetReward:
    """Append to the history of rewards, and set the combined reward."""

    session_id: str
    interaction_id: str | None
    """None: the session's final reward."""
    name: str | None
    value: float | None
    """None: words alone, which change no reward."""
    by: str
    at: float
    """Seconds since the epoch."""
    combined: float | None
    """The new reward of the interaction, or the session's final reward; None with words alone."""
    text: str | None = None


@dataclass(frozen=True, slots=True)
class MarkDelivered:
    """Mark the answers of these interactions as delivered.

    A write of nothing else is not synced: it outlives the process, perhaps not the machine.
    """

    interaction_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PutAnswer:
    """Insert the answer to an idempotent request; a key that exists fails."""

    scope: str
    key: str
    request_hash: bytes
    status: int
    body: bytes
    created_at: float


@dataclass(frozen=True, slots=True)
class DropAnswers:
    """Delete the answers created before then, by their own clock."""

    before: float


@dataclass(frozen=True, slots=True)
class EraseContent:
    """Remove the interactions, metadata and users' words of sessions; rows and rewards stay."""

    session_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ArchiveContent:
    """Remove the interactions, rewards and metadata of ended sessions that an archive has now."""

    session_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CountUsage:
    """Add a call, or a further choice of one, to what the run has used on a day."""

    day: str
    prompt_tokens: int
    sampled_tokens: int
    calls: int


@dataclass(frozen=True, slots=True)
class PutMeta:
    """Set a named JSON value of the rank, such as a counter or the run's state."""

    key: str
    value: Any


Statement: TypeAlias = (
    PutSession
    | SetState
    | SetAwaiting
    | PutInteraction
    | SetReward
    | MarkDelivered
    | PutAnswer
    | DropAnswers
    | EraseContent
    | ArchiveContent
    | CountUsage
    | PutMeta
)


KeepAnswer: TypeAlias = Callable[[BaseModel], tuple[Statement, ...]]
"""Returns the statements that store an idempotent answer. A change takes such a callback, makes its
answer before the commit, and commits the statements together with the change."""


def no_receipt(_: BaseModel) -> tuple[Statement, ...]:
    """Store nothing: the callback of a request without an idempotency key."""
    return ()


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
        self.log_away = False
        """The last write failed because the log of commits in Redis could not be written."""
        self.claim = 0
        """Number of this process's claim of the rank, higher than any earlier one's; 0: no log."""
        self.lost: str | None = None
        """The reason why this process must end: another one carries the rank now, or the file is no
        longer in its place. Nothing is written any more."""


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

    async def last_step(self) -> int | None:
        """Return the last optimizer step that consumed a session."""

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
        """Return all rewards and words that were ever given, or the last ones, in their order."""

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
