"""Groups on one rank: members join until the size is reached or the group's time is over.

A group reserves slots for all of its members from its first one on; at its deadline the unused ones
are released. It is closed, and handed out whole, when it takes no more members, none of them can
change any more, and enough of them wait to be trained on.
"""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, field

from any_agent.errors import Conflict
from any_agent.protocol.training import Unfilled
from any_agent.types import SessionState
from proxy_ext.journal.base import EXPORT_OWNER, NO_PLACE, SessionRow
from proxy_ext.sessions.ids import SessionIds
from proxy_ext.sessions.slots import Ticket

_TENANT_END = "/"
"""Ends a tenant's name in the ids of its groups: one tenant's "g1" is not another's."""
_GENERATION = "~"
"""Separates a task's name from its generation. Names that clients give contain neither."""
_UNDECIDED = {SessionState.OPEN, SessionState.AWAITING_REWARD}
_WAITING = {SessionState.FINALIZED, SessionState.LEASED}


@dataclass(frozen=True, slots=True)
class GroupKey:
    """The key that the members of a group share."""

    name: str
    """The group's id or its task's name, after the tenant's name if there is one."""
    named: bool
    """Named by `group_id`: it closes for good, while a task has one generation after another."""


def group_key(group_id: str | None, task_id: str | None, tenant: str | None) -> GroupKey:
    """Return the key of the group that an open with these fields belongs to."""
    prefix = f"{tenant}{_TENANT_END}" if tenant is not None else ""
    if group_id is not None:
        return GroupKey(prefix + group_id, named=True)
    return GroupKey(f"{prefix}{task_id}", named=False)


def public_id(group_id: str) -> str:
    """Return a group's id as its tenant knows it."""
    return group_id.rpartition(_TENANT_END)[2]


@dataclass(slots=True, eq=False)
class Group:
    """One generation of a group.

    ``members`` maps the sessions opened so far to their states. ``deadline`` is monotonic.
    ``min_size`` members must be finalized for the group to be trained on.
    """

    id: str
    key: GroupKey
    tenant: str | None
    size: int
    min_size: int
    deadline: float
    ticket: Ticket | None = None
    openers: int = 0
    """Number of opens that wait for the ticket."""
    members: dict[str, SessionState] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    """Sessions that were members and left their places to others."""
    named: int = 0
    """Number of ids given to members, those that then failed to open included."""
    promised: int = 0
    """Slots of opens that are being written."""
    expired: bool = False
    """The group's time is over: no member joins any more, and its unused slots are released."""
    handed_out: bool = False
    """A trainer has had the group with its present members."""

    @property
    def room(self) -> int:
        """Number of members that may still join, for which slots are reserved."""
        return 0 if self.expired else self.size - len(self.members) - self.promised

    @property
    def started(self) -> bool:
        """True once the group had a member: then the slots are its own, and its time runs."""
        return bool(self.members or self.left)

    @property
    def unused(self) -> bool:
        """True if the group never had a member and no open is under way."""
        return not (self.started or self.promised or self.openers)

    @property
    def has_leased(self) -> bool:
        return SessionState.LEASED in self._states

    @property
    def complete(self) -> bool:
        """True once no member joins any more and none can still be finalized."""
        return not (self.room or self.promised or self._states & _UNDECIDED)

    @property
    def too_small(self) -> bool:
        """True for a complete group with too few finalized members, which are to be rejected.

        False while an export leases one: it would have to be rejected when it is given back.
        """
        if not self.complete or self.handed_out or self.has_leased:
            return False
        return 0 < len(self.finalized) < self.min_size

    @property
    def closed(self) -> bool:
        """True once the group may be handed out, if members wait."""
        return self.complete and not self.too_small

    @property
    def finalized(self) -> list[str]:
        """Ids of members that wait to be leased."""
        return [id for id, state in self.members.items() if state is SessionState.FINALIZED]

    @property
    def done(self) -> bool:
        """True once no member can be leased any more."""
        return self.complete and not self._states & _WAITING

    def update(self, row: SessionRow) -> None:
        """Update a member's state from its journal row."""
        if row.owner == NO_PLACE:
            self.members.pop(row.id, None)
            self.left.add(row.id)
            return
        self.members[row.id] = row.state
        # A trainer that leased a session stays its owner in every later state. An export leases
        # single sessions, also of groups that are still open.
        if row.owner not in (None, EXPORT_OWNER):
            self.handed_out = True

    @property
    def _states(self) -> set[SessionState]:
        return set(self.members.values())


class GroupBook:
    """The live groups of a rank.

    A group closes ``timeout`` seconds after its first member was opened, at the latest. Of its
    sessions ``min_size`` must be finalized, or all where its size is smaller.
    """

    def __init__(self, ids: SessionIds, *, timeout: float, min_size: int) -> None:
        self._ids = ids
        self._timeout = timeout
        self._min_size = min_size
        self._by_key: dict[GroupKey, Group] = {}
        self._by_id: dict[str, Group] = {}
        self.too_small = 0
        """Number of groups rejected because too few of their members were finalized."""

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, group_id: str) -> Group | None:
        return self._by_id.get(group_id)

    def all(self) -> list[Group]:
        return list(self._by_id.values())

    @property
    def reserved(self) -> int:
        """Number of slots of groups whose members did not open yet."""
        return sum(
            group.room
            for group in self._by_id.values()
            if group.ticket is None or group.ticket.granted
        )

    def unfilled(self, tenant: str | None) -> int:
        """Return the number of a tenant's groups that reserve slots for missing members."""
        return sum(group.tenant == tenant for group in self._unfilled())

    def first_unfilled(self, limit: int) -> list[Unfilled]:
        """Return all tenants' unfilled groups that close first."""
        now = time.monotonic()
        return [
            Unfilled(
                group_id=group.id,
                size=group.size,
                members=len(group.members),
                closes_in=max(0.0, group.deadline - now),
            )
            for group in heapq.nsmallest(limit, self._unfilled(), key=lambda group: group.deadline)
        ]

    def _unfilled(self) -> list[Group]:
        return [group for group in self._by_id.values() if group.started and group.room > 0]

    def is_full(self, key: GroupKey) -> bool:
        """Return whether the next member of this key starts a new group."""
        group = self._by_key.get(key)
        return group is None or group.room <= 0

    def is_newest(self, group_id: str) -> bool:
        """Return whether further members of its key join this group, while it has room."""
        group = self._by_id.get(group_id)
        return group is not None and self._by_key.get(group.key) is group

    def join_or_create(
        self, key: GroupKey, *, tenant: str | None, size: int, by_default: bool = False
    ) -> Group:
        """Return the open generation for a new member, a new one if there is none.

        ``by_default``: the open gave no size. Conflict when the named group is full or closed, or
        has another size.
        """
        group = self._by_key.get(key)
        if group is not None and group.room > 0:
            if group.size != size:
                default = " (the default, sessions.group_size)" if by_default else ""
                raise Conflict(
                    f"the group of {public_id(key.name)} has group_size {group.size}, not "
                    f"{size}{default}; send group_size {group.size}",
                    code="group_size_mismatch",
                )
            return group
        if group is not None and key.named:
            raise closed_error(group.id)
        name = key.name if key.named else self._ids.new_generation(key.name, self._by_id)
        return self.add(self._create(name, key, tenant, size, self._timeout))

    def from_rows(self, rows: list[SessionRow], *, age: float) -> Group:
        """Return the group of these journal rows, whose first member is ``age`` seconds old."""
        first = rows[0]
        name = first.group_id or ""
        named = _GENERATION not in name
        key = group_key(public_id(name) if named else None, first.task_id, first.tenant)
        group = self._create(name, key, first.tenant, first.group_size, self._timeout - age)
        for row in rows:
            group.update(row)
        # A group that a trainer has had takes no more members after a restart, either.
        group.expired = group.handed_out or age >= self._timeout
        return group

    def start_clock(self, group: Group) -> None:
        """Start the group's time with its first member: until now it may have waited for slots."""
        group.deadline = time.monotonic() + self._timeout

    def _create(
        self, name: str, key: GroupKey, tenant: str | None, size: int, seconds: float
    ) -> Group:
        min_size = min(self._min_size, size)
        return Group(name, key, tenant, size, min_size, deadline=time.monotonic() + seconds)

    def new_member(self, group: Group) -> str:
        """Return the id of a session that is to be opened in the group."""
        while True:
            id = self._ids.new_member(group.id, group.named)
            group.named += 1
            # The ids of a recovered group were not counted.
            if id not in group.members and id not in group.left:
                return id

    def add(self, group: Group) -> Group:
        self._by_id[group.id] = group
        self._by_key[group.key] = group
        return group

    def restore(self, group: Group) -> None:
        """Add a closed group; members go on joining a later generation of its task."""
        self._by_id[group.id] = group
        self._by_key.setdefault(group.key, group)

    def discard(self, group: Group) -> None:
        self._by_id.pop(group.id, None)
        if self._by_key.get(group.key) is group:
            del self._by_key[group.key]


def closed_error(group_id: str) -> Conflict:
    """Return the error of a late member of a named group."""
    return Conflict(
        f"group {public_id(group_id)} has all its sessions or is closed; use a new group_id",
        code="group_closed",
    )
