"""Groups on one rank: members join until the size is reached; a closed group can be leased."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from any_agent.errors import Conflict
from any_agent.types import SessionState
from proxy_ext.admission import Ticket
from proxy_ext.names import Names


@dataclass(slots=True, eq=False)
class Group:
    """One generation of a group.

    ``members`` maps the sessions opened so far to their states. ``deadline`` is monotonic.
    """

    id: str
    key: str
    size: int
    deadline: float
    ticket: Ticket | None = None
    openers: int = 0
    """Opens that wait for the ticket."""
    members: dict[str, SessionState] = field(default_factory=dict)
    named: int = 0
    """Names that were given to members, also to those that then failed to open."""
    promised: int = 0
    """Slots taken by opens that are being written."""
    closed: bool = False

    @property
    def room(self) -> int:
        return self.size - len(self.members) - self.promised

    @property
    def unused(self) -> bool:
        """Whether nobody is in it, or on the way."""
        return not (self.members or self.promised or self.openers)

    @property
    def has_open(self) -> bool:
        return SessionState.OPEN in self._states

    @property
    def has_leased(self) -> bool:
        return SessionState.LEASED in self._states

    @property
    def complete(self) -> bool:
        return self.room == 0 and not self.promised and not self.has_open

    @property
    def finalized(self) -> list[str]:
        """Members that wait to be leased."""
        return [id for id, state in self.members.items() if state is SessionState.FINALIZED]

    @property
    def done(self) -> bool:
        """Whether no member can be leased any more."""
        return self.closed and not self._states & {SessionState.FINALIZED, SessionState.LEASED}

    @property
    def _states(self) -> set[SessionState]:
        return set(self.members.values())


class Groups:
    """The live groups of a rank."""

    def __init__(self, names: Names, *, timeout: float) -> None:
        self._names = names
        self._timeout = timeout
        self._by_key: dict[str, Group] = {}
        self._by_id: dict[str, Group] = {}

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
            if not group.closed and (group.ticket is None or group.ticket.granted)
        )

    def joinable(self, *, group_id: str | None, task_id: str | None, size: int) -> Group:
        """The open generation for a new member, made if there is none.

        Conflict when the named group is full or closed, or has another size.
        """
        key = f"group:{group_id}" if group_id is not None else f"task:{task_id}"
        group = self._by_key.get(key)
        if group is not None and not group.closed and group.room > 0:
            if group.size != size:
                raise Conflict(
                    f"the group of {key.partition(':')[2]} has group_size {group.size}, not {size}",
                    code="group_size_mismatch",
                )
            return group
        if group is not None and group_id is not None:
            raise closed_error(group_id)
        name = group_id or self._names.generation(task_id or "", self._by_id)
        return self.add(Group(name, key, size, time.monotonic() + self._timeout))

    def new_member(self, group: Group) -> str:
        """The id of a session to be opened in it."""
        while True:
            name = self._names.member(group.id, group.named)
            group.named += 1
            # Those of a group that the journal gave back are counted by nobody.
            if name not in group.members:
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
        f"group {group_id} has all its sessions or is closed; use a new group_id",
        code="group_closed",
    )
