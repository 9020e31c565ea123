"""What can be leased and what is: found without a look at every live session.

A change of a session or a group is noted; what it means is seen at the next look. So a poll costs
what has changed since the last one, however many sessions are open.
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
"""A group's (True) or, for one without a group, a session's id."""


_MAX_NOTED = 4096
"""Changes that are put off until the next look: where nobody polls, there is none."""


class _LeasePosition(NamedTuple):
    """In the order of handing out: the oldest first."""

    created_at: float
    key: _Key


class LeaseIndex:
    """The leased sessions of a rank, and its closed groups that wait, in their order."""

    def __init__(self, live: Mapping[str, RecordedSession], groups: GroupBook) -> None:
        self._live = live
        self._groups = groups
        self._leased: dict[str, RecordedSession] = {}
        self._noted: set[_Key] = set()
        self._waiting: list[_LeasePosition] = []
        self._places: dict[_Key, _LeasePosition] = {}

    def note(self, session: RecordedSession) -> None:
        """A session's state may have changed."""
        if session.state is SessionState.LEASED:
            self._leased[session.id] = session
        else:
            self._leased.pop(session.id, None)
        self._note(_key(session.row))

    def note_group(self, group_id: str) -> None:
        """A group may have closed."""
        self._note((True, group_id))

    @property
    def leased(self) -> Iterable[RecordedSession]:
        """Every leased session."""
        return self._leased.values()

    def first(self, most: int) -> list[list[RecordedSession]]:
        """The finalized members of up to so many closed groups, the oldest first."""
        self._look()
        return [self._members(place.key) for place in self._waiting[:most]]

    def _note(self, key: _Key) -> None:
        self._noted.add(key)
        if len(self._noted) > _MAX_NOTED:
            self._look()

    def _look(self) -> None:
        """See what has become of everything that was noted."""
        for key in self._noted:
            self._place(key)
        self._noted.clear()

    def _place(self, key: _Key) -> None:
        old = self._places.pop(key, None)
        if old is not None:
            del self._waiting[bisect_left(self._waiting, old)]
        members = self._members(key)
        if members:
            place = _LeasePosition(min(member.row.created_at for member in members), key)
            self._places[key] = place
            insort(self._waiting, place)

    def _members(self, key: _Key) -> list[RecordedSession]:
        """Who of it can be leased now."""
        grouped, id = key
        if grouped:
            group = self._groups.get(id)
            # A group is handed out whole: not while an export holds some of it.
            if group is None or not group.closed or group.has_leased:
                return []
            return [self._live[member] for member in group.finalized]
        session = self._live.get(id)
        if session is None or session.mode is not SessionMode.TRAIN:
            return []
        if session.row.owner == GRANT_OWNER:
            # Whoever granted it trains on it, and may come for it late.
            return []
        return [session] if session.state is SessionState.FINALIZED else []


def _key(row: SessionRow) -> _Key:
    return (True, row.group_id) if row.group_id is not None else (False, row.id)
