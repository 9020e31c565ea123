"""Indexes over a rank's sessions: their counts, their deadlines, and the groups to lease.

None of them scans all live sessions. Ended sessions leave the memory but not the counts, which a
restart reads from the journal: the sessions ever created are always the sum over all states.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeAlias

from any_agent.types import SessionMode, SessionState
from proxy_ext.journal.base import GRANT_OWNER, SessionRow
from proxy_ext.sessions.groups import GroupBook
from proxy_ext.sessions.session import RecordedSession

_UNDECIDED = (SessionState.OPEN, SessionState.AWAITING_REWARD)


class SessionCounts:
    """Sessions by mode and state, ended ones included."""

    def __init__(self) -> None:
        self.now: Counter[tuple[str, SessionState]] = Counter()
        self._undecided: Counter[str | None] = Counter()
        self._granted: Counter[SessionState] = Counter()
        """Live sessions that were opened on grants, by state."""
        self.on_decided: Callable[[str], None] = lambda _: None
        """Learns the tenant of each session that has ended, or got its reward."""

    @property
    def created(self) -> Counter[str]:
        """Number of sessions ever created, by mode: each of them is in one state now."""
        created: Counter[str] = Counter()
        for (mode, _), number in self.now.items():
            created[mode] += number
        return created

    def for_trainer(self, *states: SessionState) -> int:
        """Return how many live train sessions in these states a trainer has or may get."""
        return sum(self.now[SessionMode.TRAIN, state] - self._granted[state] for state in states)

    def for_exports(self, *states: SessionState) -> int:
        """Return how many live sessions in these states only exports may get."""
        return sum(self._granted[state] for state in states)

    @property
    def undecided(self) -> int:
        return self._undecided.total()

    def undecided_of(self, tenant: str) -> int:
        """Return one tenant's number of sessions that are open or await their reward."""
        return self._undecided[tenant]

    @property
    def tenants(self) -> list[str]:
        """The tenants that have such sessions."""
        return [tenant for tenant, number in self._undecided.items() if tenant and number]

    def recover(
        self, stored: Mapping[tuple[str, SessionState], int], live: Iterable[SessionRow]
    ) -> None:
        """Load the journal's counts, which include the ``live`` sessions."""
        self.now = Counter(stored)
        self._undecided, self._granted = Counter(), Counter()
        for row in live:
            self._add_live(row, 1)

    def add(self, row: SessionRow, change: int = 1) -> None:
        """Count a session in its state; a change of -1 removes it from the count."""
        self.now[str(row.mode), row.state] += change
        self._add_live(row, change)

    def move(self, before: SessionRow, after: SessionRow) -> None:
        self.add(before, -1)
        self.add(after)
        if not self._undecided[after.tenant]:
            del self._undecided[after.tenant]
        if after.tenant and before.state in _UNDECIDED and after.state not in _UNDECIDED:
            self.on_decided(after.tenant)

    def _add_live(self, row: SessionRow, change: int) -> None:
        self._undecided[row.tenant] += change * (row.state in _UNDECIDED)
        self._granted[row.state] += change * (row.owner == GRANT_OWNER)


_MAX_STALE = 1024  # outdated heap entries beyond the number of ids


class DeadlineQueue:
    """A queue of ids, each due at its own time.

    An id is due at the time of its last `add`, which costs O(log n). Its earlier heap entries are
    skipped when their turn comes, or dropped together before they outnumber the current ones.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._due: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._due)

    def add(self, id: str, at: float) -> None:
        """Make an id due at ``at`` (monotonic seconds), replacing its earlier time; inf: never."""
        if math.isinf(at):
            self._due.pop(id, None)
        elif self._due.get(id) != at:
            self._due[id] = at
            heapq.heappush(self._heap, (at, id))
            if len(self._heap) > 2 * len(self._due) + _MAX_STALE:
                self._heap = [(at, id) for id, at in self._due.items()]
                heapq.heapify(self._heap)

    def discard(self, id: str) -> None:
        self._due.pop(id, None)

    def pop(self, now: float) -> list[str]:
        """Remove and return the ids that are due, earliest first."""
        out = []
        while self._heap and self._heap[0][0] <= now:
            at, id = heapq.heappop(self._heap)
            if self._due.get(id) == at:
                del self._due[id]
                out.append(id)
        return out


_Key: TypeAlias = tuple[bool, str]
"""(True, a group's id) or, for a session without a group, (False, its id)."""

MAX_PENDING = 4096  # changes that wait for the next query: where no trainer polls, there is none


class _LeasePosition(NamedTuple):
    """The sort key of a leasable group: the oldest is handed out first."""

    created_at: float
    key: _Key


class LeaseIndex:
    """The leased sessions of a rank, and its closed groups that wait, in their order."""

    def __init__(self, live: Mapping[str, RecordedSession], groups: GroupBook) -> None:
        self._live = live
        self._groups = groups
        self._leased: dict[str, RecordedSession] = {}
        self._pending: set[_Key] = set()
        self._waiting: list[_LeasePosition] = []
        self._positions: dict[_Key, _LeasePosition] = {}

    def update(self, session: RecordedSession) -> None:
        """Update the index after a possible change of a session's state."""
        if session.state is SessionState.LEASED:
            self._leased[session.id] = session
        else:
            self._leased.pop(session.id, None)
        self._add_pending(_key(session.row))

    def update_group(self, group_id: str) -> None:
        self._add_pending((True, group_id))

    @property
    def leased(self) -> Iterable[RecordedSession]:
        return self._leased.values()

    def first(self, limit: int) -> list[list[RecordedSession]]:
        """Return the finalized members of up to ``limit`` closed groups, the oldest first."""
        self._refresh()
        return [self._members(position.key) for position in self._waiting[:limit]]

    def _add_pending(self, key: _Key) -> None:
        self._pending.add(key)
        if len(self._pending) > MAX_PENDING:
            self._refresh()

    def _refresh(self) -> None:
        for key in self._pending:
            self._reposition(key)
        self._pending.clear()

    def _reposition(self, key: _Key) -> None:
        old = self._positions.pop(key, None)
        if old is not None:
            del self._waiting[bisect_left(self._waiting, old)]
        members = self._members(key)
        if members:
            position = _LeasePosition(min(member.row.created_at for member in members), key)
            self._positions[key] = position
            insort(self._waiting, position)

    def _members(self, key: _Key) -> list[RecordedSession]:
        """Return the sessions of a group, or the single session, that can be leased now."""
        grouped, id = key
        if grouped:
            group = self._groups.get(id)
            # A group is handed out whole: not while an export leases a member.
            if group is None or not group.closed or group.has_leased:
                return []
            return [self._live[member] for member in group.finalized]
        session = self._live.get(id)
        if session is None or session.mode is not SessionMode.TRAIN:
            return []
        if session.row.owner == GRANT_OWNER:
            # Only an export gets it, which may come late.
            return []
        return [session] if session.state is SessionState.FINALIZED else []


def _key(row: SessionRow) -> _Key:
    return (True, row.group_id) if row.group_id is not None else (False, row.id)
