"""What a journal holds, as it is read back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from any_agent.types import Interaction, SessionState

IMPLICITLY = "implicit: "
"""Before the name of whose key it was, in ``opened_by`` of a session that a model call opened. No
name of a caller begins like that."""


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A session as it is stored; times are seconds since the epoch."""

    id: str
    lane: str
    mode: str
    state: SessionState
    task_id: str | None
    group_id: str | None
    """The generation of its group that it belongs to; None for a group of one."""
    group_size: int
    metadata: dict[str, Any]
    created_at: float
    expires_at: float
    final_reward: float | None = None
    reason: str | None = None
    owner: str | None = None
    """The trainer or export that holds its lease, or has had it; whose it is from the start, if it
    was opened on a grant."""
    tenant: str | None = None
    opened_by: str | None = None
    """Whose key opened it, by name."""
    pinned_version: int | None = None
    """Every token of it is of this weight version."""
    clock: str | None = None
    """The boot's id and the boot clock's seconds when it was opened."""
    awaits_until: float | None = None
    """Until when it waits for its rewards."""
    step: int | None = None
    """The optimizer step that consumed it."""
    ended_at: float | None = None
    content: Literal["stored", "archived", "deleted"] = "stored"
    """Where its interactions are."""

    @property
    def implicit(self) -> bool:
        """Whether a model call opened it."""
        return self.opened_by is not None and self.opened_by.startswith(IMPLICITLY)


@dataclass(frozen=True, slots=True)
class NumberedRow:
    """A session in the order of their creation."""

    number: int
    row: SessionRow
    interactions: int = 0
    """How many the journal holds; not counted by every read."""
    rewards_given: int = 0
    """As :attr:`interactions`."""


@dataclass(frozen=True, slots=True)
class SessionFilter:
    """Which sessions are wanted; None: any."""

    state: SessionState | None = None
    task_id: str | None = None
    group_id: str | None = None
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class SessionPage:
    """Some sessions, newest first."""

    rows: list[NumberedRow]
    before: int | None
    """The next page is of lower numbers; None: there is none."""


@dataclass(frozen=True, slots=True)
class RequestMark:
    """Which request an interaction answers, so that a retry of it finds the answer."""

    hash: bytes
    retry_count: int


@dataclass(frozen=True, slots=True)
class StoredInteraction:
    """An interaction, and what is stored beside it."""

    interaction: Interaction
    key: bytes | None
    """Under which continuations look for it; None in journals of version 1."""


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """The request that an interaction answered."""

    interaction_id: str
    mark: RequestMark
    delivered: bool


@dataclass(frozen=True, slots=True)
class RewardRow:
    """One reward as it was set, whether or not a later one replaced it."""

    interaction_id: str | None
    """None: the session's final reward."""
    name: str | None
    value: float
    by: str
    at: float
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class AnswerRow:
    """What an idempotent request was answered."""

    scope: str
    key: str
    request_hash: bytes
    status: int
    body: bytes
    created_at: float
    """Seconds since the epoch."""


EXPORT_OWNER = "export"
"""Holds what `export_trajectories` leased; a trainer does not take these back."""
GRANT_OWNER = "grant"
"""Has what was opened on a grant, until its end: whoever granted it exports it, and polls never get
it."""


NO_PLACE = "no-place"
"""Of what was aborted with `keep_place`: it is no member of its group any more, in which another
session takes its place. Nobody has it."""


def handed_out(row: SessionRow) -> bool:
    """Whether a trainer has had it, and it waits again.

    A step may have taken it that was killed before it could say so: then a resume makes that step
    again, as it was, and nothing of it must have changed.
    """
    return row.state is SessionState.FINALIZED and row.owner not in (None, GRANT_OWNER)


def for_export(row: SessionRow) -> bool:
    """Whether an export has it, or nobody but an export may."""
    return row.owner in (EXPORT_OWNER, GRANT_OWNER)


def holds(row: SessionRow, owner: str) -> bool:
    """Whether this is its lease's holder, if it is leased."""
    return row.owner == owner or (owner == EXPORT_OWNER and row.owner == GRANT_OWNER)
