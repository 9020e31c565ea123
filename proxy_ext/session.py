"""One session in memory: its states, its tree, and the calls under way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from any_agent.chat import chain_keys
from any_agent.errors import SessionClosed
from any_agent.protocol import SessionInfo
from any_agent.record import InteractionTree
from any_agent.types import SessionMode, SessionState
from proxy_ext.journal import SessionRow, StoredInteraction

if TYPE_CHECKING:
    from proxy_ext.calls import Call

LIVE_STATES = (SessionState.OPEN, SessionState.FINALIZED, SessionState.LEASED)
HANDED_OUT_STATES = (SessionState.LEASED, SessionState.TRAINED, SessionState.REJECTED)
"""What only members of a closed group get to."""
EXPORT_OWNER = "export"
"""Holds what `export_trajectories` leased; a trainer does not take these back."""
Transitions: TypeAlias = Mapping[SessionState, frozenset[SessionState]]
TRANSITIONS: Transitions = {
    SessionState.OPEN: frozenset(
        {
            SessionState.FINALIZED,
            SessionState.EVALUATED,
            SessionState.EXPIRED,
            SessionState.ABORTED,
        }
    ),
    SessionState.FINALIZED: frozenset({SessionState.LEASED, SessionState.REJECTED}),
    SessionState.LEASED: frozenset(
        {SessionState.FINALIZED, SessionState.TRAINED, SessionState.REJECTED}
    ),
}
"""Every state change there is, but for a resume's; terminal states have none."""
REPLAY: Transitions = {
    state: frozenset({SessionState.LEASED})
    for state in (SessionState.FINALIZED, *HANDED_OUT_STATES)
}
"""The state changes of a resume, which trains again on what came after its checkpoint."""


@dataclass(slots=True, eq=False)
class Session:
    """A session in memory, with its tree and the calls under way."""

    row: SessionRow
    expires: float
    """Monotonic."""
    tree: InteractionTree = field(default_factory=InteractionTree)
    calls: set[Call] = field(default_factory=set)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    lease_began: float = 0.0
    """Monotonic, as all times here."""
    lease_expires: float = 0.0
    closing: bool = False
    """It is being ended: new calls are refused and recordings of running ones are awaited."""

    @property
    def id(self) -> str:
        return self.row.id

    @property
    def mode(self) -> SessionMode:
        return SessionMode(self.row.mode)

    @property
    def state(self) -> SessionState:
        return self.row.state

    @property
    def next_number(self) -> int:
        """Of its next interaction; calls under way will be interactions, too."""
        return len(self.tree) + sum(call.completion is None for call in self.calls)

    def require_open(self) -> None:
        """SessionClosed (410) unless it is open."""
        if self.state is not SessionState.OPEN or self.closing:
            raise closed_session(self.row)

    def info(self) -> SessionInfo:
        row = self.row
        return SessionInfo(
            session_id=row.id,
            state=row.state,
            mode="train" if row.mode == "train" else "eval",
            task_id=row.task_id,
            group_id=row.group_id,
            interactions=len(self.tree),
            rewards={i.id: i.reward for i in self.tree if i.reward is not None},
            final_reward=row.final_reward,
            reason=row.reason,
            created_at=row.created_at,
            expires_in=self.expires - time.monotonic() if row.state is SessionState.OPEN else None,
        )


_IN_WORDS = {
    SessionState.OPEN: "being finalized",
    SessionState.LEASED: "finalized and handed to training",
    SessionState.TRAINED: "finalized and trained on",
}


def closed_session(row: SessionRow) -> SessionClosed:
    why = f" ({row.reason})" if row.reason else ""
    state = _IN_WORDS.get(row.state, str(row.state)) + why
    return SessionClosed(
        f"session {row.id} is {state}; it takes no more calls or rewards: start a new session",
        details={"state": str(row.state)},
    )


def add_to_tree(tree: InteractionTree, stored: StoredInteraction) -> None:
    """Add a stored interaction under the key that continuations look for."""
    interaction = stored.interaction
    if stored.key is not None:
        tree.add(interaction, stored.key)
        return
    messages = [*interaction.message_delta, interaction.output_message]
    start = tree.key(interaction.parent_id) if interaction.parent_id is not None else None
    keys = chain_keys(messages, interaction.tools, start=start)
    tree.add(interaction, keys[-1])
