"""The journal's interface: what can be written, and what can be read back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from any_agent.metrics import Histogram
from any_agent.types import Interaction, SessionState

COMMIT_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


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
    """The trainer that holds its lease."""


@dataclass(frozen=True, slots=True)
class PutSession:
    """A new session. One whose id is there already fails: nothing is ever overwritten."""

    row: SessionRow


@dataclass(frozen=True, slots=True)
class SetFinal:
    """End a session with its final reward."""

    session_id: str
    state: SessionState
    final_reward: float | None


@dataclass(frozen=True, slots=True)
class SetState:
    """Move sessions to a state."""

    session_ids: tuple[str, ...]
    state: SessionState
    reason: str | None = None
    owner: str | None = None


@dataclass(frozen=True, slots=True)
class PutInteraction:
    """Insert or replace an interaction."""

    interaction: Interaction


@dataclass(frozen=True, slots=True)
class SetInteractionReward:
    """An interaction's own reward."""

    interaction_id: str
    reward: float


@dataclass(frozen=True, slots=True)
class PutMeta:
    """A named JSON value of the rank: counters, the run's state."""

    key: str
    value: Any


Statement = PutSession | SetFinal | SetState | PutInteraction | SetInteractionReward | PutMeta


class JournalStats:
    """What the store's writes cost; written by its thread, read by whoever asks."""

    def __init__(self) -> None:
        self.writes = 0
        """Writes that were committed; one commit may carry many."""
        self.commit_seconds = Histogram(COMMIT_BOUNDS)


class Journal(Protocol):
    """One rank's store. Reads are of committed data only."""

    stats: JournalStats

    async def commit(self, *statements: Statement) -> None:
        """Write all of them durably or none; StoreUnavailable if the store cannot.

        StoreBusy, which is one, says that it was not begun; after another one a crash may show that
        it was written all the same.
        """
        ...

    async def sessions(self, states: Iterable[SessionState]) -> list[SessionRow]:
        """Sessions in any of the states, oldest first."""
        ...

    async def session_of_lane(self, lane: str) -> SessionRow | None:
        """The newest session of a lane."""
        ...

    async def session(self, session_id: str) -> SessionRow | None:
        """One session, whatever its state."""
        ...

    async def group(self, group_id: str) -> list[SessionRow]:
        """Every member that a group ever had, oldest first."""
        ...

    async def group_ids(self) -> list[str]:
        """Every group that ever had a member."""
        ...

    async def last_session(self, prefix: str) -> str | None:
        """The last session's id, in the order of ids, of those that begin with this."""
        ...

    async def counts(self) -> dict[tuple[str, SessionState], int]:
        """How many sessions there are of each mode in each state."""
        ...

    async def interactions(self, session_id: str) -> list[Interaction]:
        """In the order of their first commit: parents before children."""
        ...

    async def meta(self, key: str) -> Any:
        """A named value, or None."""
        ...

    async def close(self) -> None: ...
