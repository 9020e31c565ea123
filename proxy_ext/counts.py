"""How many sessions a rank has, by mode and state: kept in step with every change of state.

Ended sessions leave the memory but not these counts, which a restart takes from the journal. So at
any moment the sessions ever created are the sum over all states.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from any_agent.types import SessionState
from proxy_ext.journal import SessionRow


class SessionCounts:
    """Sessions created by mode, and sessions by mode and state."""

    def __init__(self) -> None:
        self.created: Counter[str] = Counter()
        self.now: Counter[tuple[str, SessionState]] = Counter()

    def recover(self, stored: Mapping[tuple[str, SessionState], int]) -> None:
        """Begin with what the journal holds."""
        self.now = Counter(stored)
        self.created = Counter()
        for (mode, _), number in stored.items():
            self.created[mode] += number

    def add(self, row: SessionRow) -> None:
        """A session was created."""
        self.created[str(row.mode)] += 1
        self.now[str(row.mode), row.state] += 1

    def move(self, before: SessionRow, after: SessionRow) -> None:
        """A session's state may have changed."""
        self.now[str(before.mode), before.state] -= 1
        self.now[str(after.mode), after.state] += 1
