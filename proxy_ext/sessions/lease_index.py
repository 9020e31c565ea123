"""An index of leasable groups and leased sessions, which never scans all live sessions.

Changes of sessions and groups are collected and applied at the next query. So a poll costs as much
as has changed since the last one, however many sessions are open.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias

from any_agent.types import SessionMode, SessionState
from proxy_ext.journal import SessionRow
from proxy_ext.journal.rows import GRANT_OWNER
from proxy_ext.sessions.groups import GroupBook
from proxy_ext.sessions.session import RecordedSession

_Key: TypeAlias = tuple[bool, str]
"""(True, a group's id) or, for a session without a group, (False, its id)."""

_MAX_PENDING = 4096
"""Changes that wait for the next query: where no trainer polls, there is none."""


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
        """Take over a possible change of a session's state."""
        if session.state is SessionState.LEASED:
            self._leased[session.id] = session
        else:
            self._leased.pop(session.id, None)
        self._add_pending(_key(session.row))

    def update_group(self, group_id: str) -> None:
        """Take over that a group may have closed."""
        self._add_pending((True, group_id))

    @property
    def leased(self) -> Iterable[RecordedSession]:
        """All leased sessions."""
        return self._leased.values()

    def first(self, limit: int) -> list[list[RecordedSession]]:
        """Return the finalized members of up to ``limit`` closed groups, the oldest first."""
        self._refresh()
        return [self._members(position.key) for position in self._waiting[:limit]]

    def _add_pending(self, key: _Key) -> None:
        self._pending.add(key)
        if len(self._pending) > _MAX_PENDING:
            self._refresh()

    def _refresh(self) -> None:
        """Apply all pending changes."""
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
