"""Groups on one rank: members join until the size is reached or the group's time is over.

A group holds slots for all of its members from its first one on; at its deadline those that nobody
took are given back. It is closed, and handed out whole, when it takes no more members, none of them
can change any more, and enough of them wait to be trained on.
"""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, field

from any_agent.errors import Conflict
from any_agent.protocol.rl import Unfilled
from any_agent.types import SessionState
from proxy_ext.journal import SessionRow
from proxy_ext.journal.rows import EXPORT_OWNER, NO_PLACE
from proxy_ext.sessions.ids import SessionIds
from proxy_ext.sessions.slots import Ticket

_TENANT_ENDS = "/"
"""After a tenant's name in the ids of its groups: one tenant's "g1" is not another's."""
_GENERATION = "~"
"""Between a task's name and its generation's. No name that a client gives holds either."""
_UNDECIDED = {SessionState.OPEN, SessionState.AWAITING_REWARD}


@dataclass(frozen=True, slots=True)
class GroupKey:
    """What the members of a group have in common."""

    name: str
    """The group's id, or its task's name; behind the tenant's, if it has one."""
    named: bool
    """By `group_id`: it is closed for good then, while a task has one generation after another."""


def group_key(group_id: str | None, task_id: str | None, tenant: str | None) -> GroupKey:
    """Where an open with these fields belongs."""
    whose = f"{tenant}{_TENANT_ENDS}" if tenant is not None else ""
    if group_id is not None:
        return GroupKey(whose + group_id, named=True)
    return GroupKey(f"{whose}{task_id}", named=False)


def public_id(group_id: str) -> str:
    """A group's id as its tenant knows it."""
    return group_id.rpartition(_TENANT_ENDS)[2]


@dataclass(slots=True, eq=False)
class Group:
    """One generation of a group.

    ``members`` maps the sessions opened so far to their states. ``deadline`` is monotonic.
    ``least`` is how many of them must be finalized for the group to be trained on.
    """

    id: str
    key: GroupKey
    tenant: str | None
    size: int
    least: int
    deadline: float
    ticket: Ticket | None = None
    openers: int = 0
    """Opens that wait for the ticket."""
    members: dict[str, SessionState] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    """Sessions that were members, and left their places to others."""
    named: int = 0
    """Names that were given to members, also to those that then failed to open."""
    promised: int = 0
    """Slots taken by opens that are being written."""
    over: bool = False
    """Its time is over: nobody joins any more, and the slots that were left are given back."""
    handed_out: bool = False
    """A trainer has had it, with the members that it has."""

    @property
    def room(self) -> int:
        """Members that may still join, for whom slots are kept."""
        return 0 if self.over else self.size - len(self.members) - self.promised

    @property
    def begun(self) -> bool:
        """Whether it has had a member: then the slots are its own, and its time runs."""
        return bool(self.members or self.left)

    @property
    def unused(self) -> bool:
        """Whether nobody was ever in it, or is on the way."""
        return not (self.begun or self.promised or self.openers)

    @property
    def has_leased(self) -> bool:
        return SessionState.LEASED in self._states

    @property
    def complete(self) -> bool:
        """Whether nobody joins any more, and no member can still be finalized."""
        return not (self.room or self.promised or self._states & _UNDECIDED)

    @property
    def too_small(self) -> bool:
        """Whether it is complete and its finalized members are too few; they are to be rejected.

        Not while an export holds some: what it gives back would have to be rejected, too.
        """
        if not self.complete or self.handed_out or self.has_leased:
            return False
        return 0 < len(self.finalized) < self.least

    @property
    def closed(self) -> bool:
        """Whether it may be handed out, as far as its members are there."""
        return self.complete and not self.too_small

    @property
    def finalized(self) -> list[str]:
        """Members that wait to be leased."""
        return [id for id, state in self.members.items() if state is SessionState.FINALIZED]

    @property
    def done(self) -> bool:
        """Whether no member can be leased any more."""
        return self.complete and not self._waiting

    def note(self, row: SessionRow) -> None:
        """A member's state, as the journal has it."""
        if row.owner == NO_PLACE:
            self.members.pop(row.id, None)
            self.left.add(row.id)
            return
        self.members[row.id] = row.state
        # The trainer that leases a session stays its owner, whatever becomes of it then. An export
        # leases single sessions, also of groups that are still open.
        if row.owner not in (None, EXPORT_OWNER):
            self.handed_out = True

    @property
    def _waiting(self) -> int:
        """Members that are to be trained on, leased ones included."""
        states = list(self.members.values())
        return states.count(SessionState.FINALIZED) + states.count(SessionState.LEASED)

    @property
    def _states(self) -> set[SessionState]:
        return set(self.members.values())


class GroupBook:
    """The live groups of a rank.

    A group closes ``timeout`` seconds after its first member was opened, at the latest. Of its
    sessions ``least`` must be finalized, or all where its size is smaller.
    """

    def __init__(self, names: SessionIds, *, timeout: float, least: int) -> None:
        self._names = names
        self._timeout = timeout
        self._least = least
        self._by_key: dict[GroupKey, Group] = {}
        self._by_id: dict[str, Group] = {}
        self.too_small = 0
        """Groups that were rejected because too few of their members were finalized."""

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, group_id: str) -> Group | None:
        return self._by_id.get(group_id)

    def all(self) -> list[Group]:
        return list(self._by_id.values())

    @property
    def reserved(self) -> int:
        """Slots granted to groups whose members did not open yet."""
        return sum(
            group.room
            for group in self._by_id.values()
            if group.ticket is None or group.ticket.granted
        )

    def unfilled(self, tenant: str | None) -> int:
        """How many groups of a tenant are begun, and keep slots for members that are not there."""
        mine = (group for group in self._by_id.values() if group.tenant == tenant)
        return sum(group.begun and group.room > 0 for group in mine)

    def unfilled_first(self, most: int) -> list[Unfilled]:
        """Of all tenants, those that close first."""
        now = time.monotonic()
        begun = [group for group in self._by_id.values() if group.begun and group.room > 0]
        return [
            Unfilled(
                group_id=group.id,
                size=group.size,
                members=len(group.members),
                closes_in=max(0.0, group.deadline - now),
            )
            for group in heapq.nsmallest(most, begun, key=lambda group: group.deadline)
        ]

    def begins(self, key: GroupKey) -> bool:
        """Whether the next member of it begins a group."""
        group = self._by_key.get(key)
        return group is None or group.room <= 0

    def is_newest(self, group_id: str) -> bool:
        """Whether further members of its kind join this one, as far as it has room."""
        group = self._by_id.get(group_id)
        return group is not None and self._by_key.get(group.key) is group

    def joinable(
        self, key: GroupKey, *, tenant: str | None, size: int, by_default: bool = False
    ) -> Group:
        """The open generation for a new member, made if there is none.

        ``by_default``: the open did not say the size. Conflict when the named group is full or
        closed, or has another size.
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
        name = key.name if key.named else self._names.generation(key.name, self._by_id)
        return self.add(self._made(name, key, tenant, size, self._timeout))

    def recovered(self, rows: list[SessionRow], *, age: float) -> Group:
        """A group of these members, as the journal has them, that began ``age`` seconds ago."""
        first = rows[0]
        name = first.group_id or ""
        named = _GENERATION not in name
        key = group_key(public_id(name) if named else None, first.task_id, first.tenant)
        group = self._made(name, key, first.tenant, first.group_size, self._timeout - age)
        for row in rows:
            group.note(row)
        # With the members that it had it was over before, too.
        group.over = group.handed_out or age >= self._timeout
        return group

    def begin(self, group: Group) -> None:
        """Its first member is there: its time begins. Until now it may have waited for slots."""
        group.deadline = time.monotonic() + self._timeout

    def _made(
        self, name: str, key: GroupKey, tenant: str | None, size: int, seconds: float
    ) -> Group:
        least = min(self._least, size)
        return Group(name, key, tenant, size, least, deadline=time.monotonic() + seconds)

    def new_member(self, group: Group) -> str:
        """The id of a session to be opened in it."""
        while True:
            name = self._names.member(group.id, group.named)
            group.named += 1
            # Those of a group that the journal gave back are counted by nobody.
            if name not in group.members and name not in group.left:
                return name

    def add(self, group: Group) -> Group:
        self._by_id[group.id] = group
        self._by_key[group.key] = group
        return group

    def restore(self, group: Group) -> None:
        """Add a closed one; a later generation of its task stays the one that is joined."""
        self._by_id[group.id] = group
        self._by_key.setdefault(group.key, group)

    def discard(self, group: Group) -> None:
        self._by_id.pop(group.id, None)
        if self._by_key.get(group.key) is group:
            del self._by_key[group.key]


def closed_error(group_id: str) -> Conflict:
    """What a late member of a named group is told."""
    return Conflict(
        f"group {public_id(group_id)} has all its sessions or is closed; use a new group_id",
        code="group_closed",
    )
