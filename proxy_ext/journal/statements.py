"""What can be written to a journal: small statements that commit together or not at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from pydantic import BaseModel

from any_agent.types import Interaction, SessionState
from proxy_ext.journal.rows import RequestMark, SessionRow


@dataclass(frozen=True, slots=True)
class PutSession:
    """A new session. One whose id is there already fails: nothing is ever overwritten."""

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
    """When they ended, if this is the end; seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class SetAwaiting:
    """A session takes no more calls, and rewards until then (seconds since the epoch)."""

    session_id: str
    until: float


@dataclass(frozen=True, slots=True)
class PutInteraction:
    """Insert or replace an interaction. A key or a mark that it has already is kept."""

    interaction: Interaction
    key: bytes | None = None
    """Under which continuations look for it."""
    request: RequestMark | None = None


@dataclass(frozen=True, slots=True)
class SetReward:
    """Append to the history of rewards, and set the reward that it adds up to."""

    session_id: str
    interaction_id: str | None
    """None: the session's final reward."""
    name: str | None
    value: float
    by: str
    at: float
    """Seconds since the epoch."""
    combined: float
    """What the interaction's, or the session's final, reward is from now on."""


@dataclass(frozen=True, slots=True)
class MarkDelivered:
    """The answers of these interactions reached their clients.

    A write of nothing else is not synced: it outlives the process, perhaps not the machine.
    """

    interaction_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PutAnswer:
    """What an idempotent request was answered; one under the same key already fails."""

    scope: str
    key: str
    request_hash: bytes
    status: int
    body: bytes
    created_at: float


@dataclass(frozen=True, slots=True)
class DropAnswers:
    """Forget the answers created before then (seconds since the epoch)."""

    before: float


@dataclass(frozen=True, slots=True)
class EraseContent:
    """Remove the interactions and the metadata of sessions; their rows and rewards stay."""

    session_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ArchiveContent:
    """Remove the interactions, rewards and metadata of ended sessions that an archive holds now."""

    session_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PutMeta:
    """A named JSON value of the rank: counters, the run's state."""

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
"""From an answer to what keeps it. Whatever changes something takes one, makes its answer before
the commit, and commits these statements with the rest."""


def no_receipt(_: BaseModel) -> tuple[Statement, ...]:
    """The KeepAnswer callback of a request without a key."""
    return ()
