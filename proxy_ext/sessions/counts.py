"""The numbers of a rank's sessions by mode and state, updated with every change of state.

Ended sessions leave the memory but not these counts, which a restart reads from the journal. So at
any moment the sessions ever created are the sum over all states.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from any_agent.types import SessionMode, SessionState
from proxy_ext.journal import SessionRow
from proxy_ext.journal.rows import GRANT_OWNER

_UNDECIDED = (SessionState.OPEN, SessionState.AWAITING_REWARD)


class SessionCounts:
    """Sessions created by mode, and sessions by mode and state."""

    def __init__(self) -> None:
        self.created: Counter[str] = Counter()
        self.now: Counter[tuple[str, SessionState]] = Counter()
        self._undecided: Counter[str | None] = Counter()
        self._granted: Counter[SessionState] = Counter()
        """Live sessions that were opened on grants, by state."""

    def for_trainer(self, *states: SessionState) -> int:
        """Return how many live train sessions in these states a trainer has or may get."""
        return sum(self.now[SessionMode.TRAIN, state] - self._granted[state] for state in states)

    @property
    def undecided(self) -> int:
        """Number of sessions that are open or await their reward."""
        return self._undecided.total()

    def undecided_of(self, tenant: str) -> int:
        """Return one tenant's number of sessions that are open or await their reward."""
        return self._undecided[tenant]

    def recover(
        self, stored: Mapping[tuple[str, SessionState], int], live: Iterable[SessionRow]
    ) -> None:
        """Start with the journal's counts, which include the ``live`` sessions."""
        self.now = Counter(stored)
        self.created = Counter()
        for (mode, _), number in stored.items():
            self.created[mode] += number
        rows = list(live)
        self._undecided = Counter(row.tenant for row in rows if row.state in _UNDECIDED)
        self._granted = Counter(row.state for row in rows if row.owner == GRANT_OWNER)

    def add(self, row: SessionRow) -> None:
        """Count a new session."""
        self.created[str(row.mode)] += 1
        self.now[str(row.mode), row.state] += 1
        self._undecided[row.tenant] += row.state in _UNDECIDED
        self._granted[row.state] += row.owner == GRANT_OWNER

    def move(self, before: SessionRow, after: SessionRow) -> None:
        """Count a change of a session's row."""
        self.now[str(before.mode), before.state] -= 1
        self.now[str(after.mode), after.state] += 1
        self._granted[before.state] -= before.owner == GRANT_OWNER
        self._granted[after.state] += after.owner == GRANT_OWNER
        self._undecided[after.tenant] += (after.state in _UNDECIDED) - (before.state in _UNDECIDED)
        if not self._undecided[after.tenant]:
            del self._undecided[after.tenant]
