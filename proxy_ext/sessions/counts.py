"""How many sessions a rank has, by mode and state: kept in step with every change of state.

Ended sessions leave the memory but not these counts, which a restart takes from the journal. So at
any moment the sessions ever created are the sum over all states.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from any_agent.types import SessionState
from proxy_ext.journal import SessionRow

_UNDECIDED = (SessionState.OPEN, SessionState.AWAITING_REWARD)


class SessionCounts:
    """Sessions created by mode, and sessions by mode and state."""

    def __init__(self) -> None:
        self.created: Counter[str] = Counter()
        self.now: Counter[tuple[str, SessionState]] = Counter()

        self._undecided: Counter[str | None] = Counter()

    @property
    def undecided(self) -> int:
        """Sessions that are open or await their reward."""
        return self._undecided.total()

    def undecided_of(self, tenant: str) -> int:
        """As `undecided`, one tenant's."""
        return self._undecided[tenant]

    def recover(
        self, stored: Mapping[tuple[str, SessionState], int], live: Iterable[SessionRow]
    ) -> None:
        """Begin with what the journal holds, ``live`` sessions among it."""
        self.now = Counter(stored)
        self.created = Counter()
        for (mode, _), number in stored.items():
            self.created[mode] += number
        self._undecided = Counter(row.tenant for row in live if row.state in _UNDECIDED)

    def add(self, row: SessionRow) -> None:
        """A session was created."""
        self.created[str(row.mode)] += 1
        self.now[str(row.mode), row.state] += 1
        self._undecided[row.tenant] += row.state in _UNDECIDED

    def move(self, before: SessionRow, after: SessionRow) -> None:
        """A session's state may have changed."""
        self.now[str(before.mode), before.state] -= 1
        self.now[str(after.mode), after.state] += 1
        self._undecided[after.tenant] += (after.state in _UNDECIDED) - (before.state in _UNDECIDED)
        if not self._undecided[after.tenant]:
            del self._undecided[after.tenant]
