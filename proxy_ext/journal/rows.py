"""The rows of a journal, as they are read back, and the owners of sessions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from any_agent.types import Interaction, SessionState

IMPLICITLY = "implicit: "
"""Prefix of ``opened_by`` in sessions that a model call opened; no caller's name begins with it."""


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


@dataclass(frozen=True, slots=True)
class SessionFilter:
    """A choice of sessions; a field that is None matches all."""

    state: SessionState | None = None
    task_id: str | None = None
    group_id: str | None = None
    tenant: str | None = None


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
    """The chain key by which continuations find the interaction; None in version 1."""


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
    value: float
    by: str
    at: float
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class AnswerRow:
    """The stored answer to an idempotent request."""

    scope: str
    key: str
    request_hash: bytes
    status: int
    body: bytes
    created_at: float
    """Seconds since the epoch."""


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
