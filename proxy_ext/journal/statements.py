"""The writes of a journal: small statements that commit together or not at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from pydantic import BaseModel

from any_agent.types import Interaction, SessionState
from proxy_ext.journal.rows import RequestMark, SessionRow


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
    value: float
    by: str
    at: float
    """Seconds since the epoch."""
    combined: float
    """The new reward of the interaction, or the session's final reward."""


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
    """Delete the answers created before then (seconds since the epoch)."""

    before: float


@dataclass(frozen=True, slots=True)
class EraseContent:
    """Remove the interactions and the metadata of sessions; their rows and rewards stay."""

    session_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ArchiveContent:
    """Remove the interactions, rewards and metadata of ended sessions that an archive has now."""

    session_ids: tuple[str, ...]


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
    | PutMeta
)


KeepAnswer: TypeAlias = Callable[[BaseModel], tuple[Statement, ...]]
"""Returns the statements that store an idempotent answer. A change takes such a callback, makes its
answer before the commit, and commits the statements together with the change."""


def no_receipt(_: BaseModel) -> tuple[Statement, ...]:
    """Store nothing: the callback of a request without an idempotency key."""
    return ()
