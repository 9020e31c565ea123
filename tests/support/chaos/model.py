"""What the `/rl` API is to do, as plain Python: no queue, no disk, no time.

Each method answers what a request must be answered, a status and an error's code, and changes the
model as the request must change the service. Hypothesis holds the service against it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

OK = (200, "")
CLOSED = (410, "session_closed")
IN_TRAINING = (409, "in_training")
LOST = (409, "lease_lost")
EXPORT = "export"
MIN_GROUP = 2
BUFFERED = ("awaiting_reward", "finalized", "leased")
TAKEN = ("trained", "rejected")
FINALIZED_ONCE = ("finalized", "leased", "evaluated", *TAKEN)
Verdict = tuple[int, str]


@dataclass(slots=True, eq=False)
class Session:
    """One session as its agent knows it."""

    id: str
    key: str
    mode: str
    group: str | None
    state: str = "open"
    calls: list[str] = field(default_factory=list)
    rewards: dict[str, dict[str, float]] = field(default_factory=dict)
    """By completion id, then by name; "" for the unnamed one."""
    final: dict[str, float] = field(default_factory=dict)
    owner: str = ""
    step: int | None = None
    """Of the optimizer that consumed it."""
    erased: bool = False

    @property
    def train(self) -> bool:
        return self.mode == "train"

    @property
    def working(self) -> bool:
        """Whether its group waits for it."""
        return self.state in ("open", "awaiting_reward")

    @property
    def revisable(self) -> bool:
        return self.working or (self.state == "finalized" and not self.owner)

    def own_rewards(self) -> dict[str, float]:
        return {id: sum(named.values()) for id, named in self.rewards.items()}

    @property
    def final_reward(self) -> float | None:
        return sum(self.final.values()) if self.final else None


@dataclass(slots=True, eq=False)
class Group:
    size: int
    members: list[Session] = field(default_factory=list)

    @property
    def has_room(self) -> bool:
        return len(self.members) < self.size

    @property
    def closed(self) -> bool:
        return not self.has_room and not any(m.working for m in self.members)

    @property
    def leased(self) -> bool:
        return any(m.state == "leased" for m in self.members)

    @property
    def handed_out(self) -> bool:
        """Whether a trainer has had it."""
        return any(m.owner not in ("", EXPORT) for m in self.members)


@dataclass(frozen=True, slots=True)
class Opened:
    """What an open asks for."""

    mode: str
    group: str | None = None
    task: str | None = None
    size: int = 1
    key: str | None = None
    """Of an earlier session."""


class Model:
    """One rank."""

    def __init__(self) -> None:
        self.limit = 0
        self.admitted = 0
        self.sessions: list[Session] = []
        self.groups: dict[str, Group] = {}
        self.tasks: dict[str, str] = {}
        """The newest group of each task."""
        self.lanes: dict[str, Session] = {}
        """The newest session of each key."""
        self.too_small: list[Session] = []
        """Members of groups that closed just now: the service rejects them within a second."""

    def may_open(self, wanted: Opened) -> Verdict:
        newest = self.lanes.get(wanted.key or "")
        if newest is not None and newest.state == "open":
            return 409, "lane_busy"
        if wanted.mode == "eval":
            return OK
        known = self.groups.get(wanted.group or self.tasks.get(wanted.task or "", ""))
        if known is not None and known.has_room:
            return OK
        if known is not None and wanted.group is not None:
            return 409, "group_closed"
        return OK if wanted.size <= self.limit - self.admitted else (429, "no_capacity")

    def opened(self, session: Session, wanted: Opened) -> None:
        self.sessions.append(session)
        self.lanes[session.key] = session
        if not session.train:
            return
        if session.group is None:
            self.admitted += 1
            return
        if session.group not in self.groups:
            self.groups[session.group] = Group(wanted.size)
            self.admitted += wanted.size
        if wanted.group is None and wanted.task is not None:
            self.tasks[wanted.task] = session.group
        self.groups[session.group].members.append(session)

    def call(self, session: Session) -> Verdict:
        return OK if session.state == "open" else CLOSED

    def reward(
        self, session: Session, completion: str | None, rewards: dict[str, float]
    ) -> Verdict:
        if not session.revisable:
            return CLOSED
        if completion is not None and completion not in session.calls:
            return 404, "completion_not_found"
        if not session.calls:
            return 422, "no_interactions"
        session.rewards.setdefault(completion or session.calls[-1], {}).update(rewards)
        return OK

    def reward_final(self, session: Session, rewards: dict[str, float]) -> Verdict:
        if not session.revisable:
            return CLOSED
        session.final.update(rewards)
        return OK

    def finalize(self, session: Session, rewards: dict[str, float]) -> Verdict:
        if session.state in FINALIZED_ONCE:
            same = rewards.items() <= session.final.items()
            return OK if same else (409, "already_finalized")
        if not session.working:
            return CLOSED
        if session.train:
            if not session.calls:
                return 422, "no_interactions"
            if not (rewards or session.final or session.rewards):
                return 422, "no_reward"
        session.final.update(rewards)
        session.state = "finalized" if session.train else "evaluated"
        self._settle(session)
        return OK

    def await_reward(self, session: Session) -> Verdict:
        if session.state in ("awaiting_reward", *FINALIZED_ONCE):
            return OK
        if session.state != "open":
            return CLOSED
        if not session.calls:
            return 422, "no_interactions"
        session.state = "awaiting_reward"
        return OK

    def abort(self, session: Session) -> Verdict:
        if not session.working:
            return CLOSED
        session.state = "aborted"
        self._settle(session)
        return OK

    def veto(self, session: Session) -> Verdict:
        if session.working:
            return 409, "not_finalized"
        if session.state == "leased" or (session.state == "finalized" and session.owner):
            return IN_TRAINING
        if session.state != "finalized":
            return CLOSED
        session.state = "rejected"
        self._settle(session)
        return OK

    def delete(self, session: Session) -> Verdict:
        """No checkpoint is kept, so whatever was trained on may still be needed."""
        if session.state == "leased" or (session.state in TAKEN and session.step is not None):
            return IN_TRAINING
        if session.state == "finalized" and session.owner:
            return IN_TRAINING
        if session.working:
            session.state = "aborted"
        elif session.state == "finalized":
            session.state = "rejected"
        session.erased = True
        self._settle(session)
        return OK

    def _settle(self, session: Session) -> None:
        """A member's end may close its group, which may be too small then."""
        group = self.groups.get(session.group or "")
        if group is None or not group.closed or group.leased or group.handed_out:
            return
        finalized = [member for member in group.members if member.state == "finalized"]
        if len(finalized) < min(MIN_GROUP, group.size):
            for member in finalized:
                member.state = "rejected"
            self.too_small += finalized

    def ready(self) -> list[list[Session]]:
        """What can be leased: whole groups."""
        out = [[s] for s in self.sessions if s.state == "finalized" and s.group is None]
        for group in self.groups.values():
            members = [member for member in group.members if member.state == "finalized"]
            if members and group.closed and not group.leased:
                out.append(members)
        return out

    def export(self, session: Session) -> Verdict:
        if session.state == "leased" and session.owner == EXPORT:
            return OK
        if session.state != "finalized":
            return 409, "not_finalized"
        if session.owner:
            return IN_TRAINING
        session.state, session.owner = "leased", EXPORT
        return OK

    def replay(self, session: Session, owner: str) -> Verdict:
        known = session.state in ("finalized", "leased", *TAKEN)
        if not known or session.erased or session.owner == EXPORT:
            return 409, "not_replayable"
        session.state, session.owner, session.step = "leased", owner, None
        return OK

    def ack(self, session: Session, owner: str, state: str, step: int | None) -> Verdict:
        if session.state == state:
            return OK
        if session.state != "leased" or session.owner != owner:
            return LOST
        session.state, session.step = state, step
        self._settle(session)
        return OK

    def leased(self, owner: str) -> list[Session]:
        return [s for s in self.sessions if s.state == "leased" and s.owner == owner]

    def taken_over(self, owner: str) -> None:
        """Another trainer has appeared: what the earlier one held waits again."""
        for session in self.sessions:
            if session.state == "leased" and session.owner not in (owner, EXPORT):
                session.state = "finalized"

    def counts(self) -> dict[str, int]:
        train = [s for s in self.sessions if s.train]
        return {
            "admitted": self.admitted,
            "reserved": self.admitted - len(train),
            "running": sum(s.state == "open" for s in train),
            "buffered": sum(s.state in BUFFERED for s in train),
        }
