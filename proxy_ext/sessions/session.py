"""One session in memory: its row, its tree of interactions, and its calls under way."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from any_agent.errors import VersionGone
from any_agent.protocol.rl import Heartbeat, Rewards, SessionInfo, SessionLine
from any_agent.record import InteractionTree, count_calls, is_frozen
from any_agent.runtime.boot_clock import seconds_since
from any_agent.types import Interaction, SessionMode, SessionState
from proxy_ext.journal import RequestMark, SessionRow, StoredInteraction
from proxy_ext.journal.base import NumberedRow
from proxy_ext.sessions import state_machine as lifecycle
from proxy_ext.sessions.groups import public_id
from proxy_ext.sessions.state_machine import Event

LIVE_STATES = (
    SessionState.OPEN,
    SessionState.AWAITING_REWARD,
    SessionState.FINALIZED,
    SessionState.LEASED,
)

_PUBLIC_FIELDS = (
    *("state", "reason", "task_id", "tenant", "content"),
    *("final_reward", "step", "created_at", "ended_at"),
)


class ActiveCall(Protocol):
    """A call under way, as seen by its session."""

    task: asyncio.Task[None] | None

    def abort(self, reason: str) -> None:
        """Cancel the call; an answer that is being recorded is still recorded."""


class PolicyCall(ActiveCall, Protocol):
    """A call of the trained model, whose answers are in its session's tree."""

    @property
    def undelivered(self) -> list[Interaction]:
        """The recorded answers whose end was not sent to a client."""


async def abort_calls(calls: Iterable[ActiveCall], reason: str, *, seconds: float) -> None:
    """Abort calls, and wait up to ``seconds`` for those that are being recorded."""
    calls = list(calls)
    for call in calls:
        call.abort(reason)
    if tasks := [call.task for call in calls if call.task is not None]:
        await asyncio.wait(tasks, timeout=seconds)


@dataclass(slots=True, eq=False, weakref_slot=True)
class RecordedSession:
    """A session in memory, with its tree and its calls under way. All times are monotonic."""

    row: SessionRow
    id: str = field(init=False)
    mode: SessionMode = field(init=False)
    idle_timeout: float = math.inf
    """Seconds without a call, a reward or a heartbeat after which the session expires."""
    opened: float = 0.0
    """Time of the opening, derived from the row's clock, which survives a restart."""
    active: float = field(default_factory=time.monotonic)
    """Time of the last call, reward or heartbeat."""
    _tree: InteractionTree | None = field(default=None, init=False, repr=False)
    calls: set[PolicyCall] = field(default_factory=set)
    frozen_calls: set[ActiveCall] = field(default_factory=set)
    """Calls of frozen models under way."""
    unconfirmed: dict[str, RequestMark] = field(default_factory=dict)
    """Answers that are not known to have reached the agent, oldest first: an earlier process's, and
    undelivered ones that the store could not record."""
    recovered: bool = False
    """An earlier process opened it, and its unconfirmed answers are not loaded yet."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    lease_began: float = 0.0
    lease_expires: float = 0.0
    closing: bool = False
    """The session is being ended: new calls are refused, running recordings are awaited."""

    def __post_init__(self) -> None:
        self.id, self.mode = self.row.id, SessionMode(self.row.mode)
        if self.opened == 0.0:
            self.opened = time.monotonic() - session_age(self.row)

    @property
    def state(self) -> SessionState:
        return self.row.state

    @property
    def tree(self) -> InteractionTree:
        """The interactions; RuntimeError if they are in the journal alone.

        `await sessions.load(session)` first, and do not await in between, unless the session's lock
        is held or one of its calls is under way.
        """
        if self._tree is None:
            raise RuntimeError(f"the tree of session {self.id} was not loaded")
        return self._tree

    @tree.setter
    def tree(self, tree: InteractionTree) -> None:
        self._tree = tree

    @property
    def loaded(self) -> bool:
        """True while the tree is in memory."""
        return self._tree is not None

    def unload(self) -> None:
        """Drop the tree from memory; the journal has it."""
        self._tree = None

    @property
    def expires(self) -> float:
        """Time at which the session's ttl runs out."""
        return self.opened + self.row.expires_at - self.row.created_at

    @property
    def idle_expires(self) -> float:
        """Time at which the session expires as idle, unless something happens before."""
        busy = self.calls or self.frozen_calls
        return (time.monotonic() if busy else self.active) + self.idle_timeout

    @property
    def reward_due(self) -> float:
        """Deadline of the awaited reward; inf without one."""
        until = self.row.awaits_until
        return math.inf if until is None else self.opened + until - self.row.created_at

    def row_time(self, monotonic: float) -> float:
        """Return a time as the row stores it: ``created_at`` and the seconds since the opening."""
        return self.row.created_at + monotonic - self.opened

    def touch(self) -> None:
        self.active = time.monotonic()

    def require_open(self) -> None:
        """Raise SessionClosed (410) unless the session takes calls."""
        lifecycle.target(self.row, Event.CALL)
        if self.closing:
            raise lifecycle.refusal(self.row, Event.CALL, closing=True)

    def heartbeat(self) -> Heartbeat:
        """Renew the idle time and return the times left; SessionClosed unless it is open."""
        lifecycle.target(self.row, Event.HEARTBEAT)
        self.touch()
        now = time.monotonic()
        return Heartbeat(
            session_id=self.id, expires_in=self.expires - now, idle_in=self.idle_expires - now
        )

    def require_version(self, serving: int) -> None:
        """Raise VersionGone if the session is pinned to another weight version."""
        pinned = self.row.pinned_version
        if pinned is not None and pinned != serving:
            raise VersionGone.of(pinned, serving)

    def info(
        self,
        row: SessionRow | None = None,
        tree: InteractionTree | None = None,
        undelivered: Collection[str] = (),
    ) -> SessionInfo:
        """Return the session's description, as it will be with this row and tree.

        ``undelivered``: ids of answers that are about to be marked so.
        """
        row = row or self.row
        tree = self.tree if tree is None else tree
        rewards = {i.id: i.reward for i in tree if i.reward is not None}
        first, last = _versions(tree)
        now = time.monotonic()
        taking_calls = row.state is SessionState.OPEN
        awaiting = row.state is SessionState.AWAITING_REWARD
        until = self.row_time(now)
        idle_in = self.idle_expires - now
        # Without its content nothing tells whether single interactions were rewarded.
        unrewarded = False if row.content == "stored" else None
        counts = count_calls(tree, undelivered) if row.content == "stored" else None
        trained = counts if self.mode is SessionMode.TRAIN else None
        return SessionInfo(
            **public_fields(row),
            opened_by=row.opened_by,
            rewarded_by=public_rewards(row),
            interactions=len(tree),
            rewards=rewards,
            rewarded=True if rewards or row.final_reward is not None else unrewarded,
            first_version=first,
            last_version=last,
            pinned_version=row.pinned_version,
            output_tokens=sum(len(i.output_ids) for i in tree) if row.content == "stored" else None,
            expires_in=row.expires_at - until if taking_calls else None,
            idle_in=idle_in if taking_calls and math.isfinite(idle_in) else None,
            awaits_in=row.awaits_until - until if awaiting and row.awaits_until else None,
            trainable_calls=trained.trained if trained else None,
            untrainable_calls=dict(trained.untrained) if trained else {},
            roots=counts.roots if counts else None,
            root_reasons=dict(counts.root_reasons) if counts else {},
            roles=_roles(tree),
        )


def public_rewards(row: SessionRow) -> Rewards:
    """Return the source of a session's rewards under its public name."""
    by = row.rewarded_by
    return "judge" if by == "grader" or by == "operator" else by


def public_fields(row: SessionRow) -> dict[str, Any]:
    """Return the fields of a row that every description of a session has."""
    same = {name: getattr(row, name) for name in _PUBLIC_FIELDS}
    group_id = public_id(row.group_id) if row.group_id else None
    return {"session_id": row.id, "mode": str(row.mode), "group_id": group_id, **same}


def session_line(each: NumberedRow) -> SessionLine:
    """Return a session as a line of a list of sessions."""
    row = each.row
    rewards = [r for r in (row.final_reward, each.interaction_reward) if r is not None]
    return SessionLine(
        **public_fields(row),
        number=each.number,
        interactions=each.interactions,
        rewards_given=each.rewards_given if row.content == "stored" else each.rewards_given or None,
        reward=sum(rewards) if rewards else None,
    )


def _roles(tree: InteractionTree) -> dict[str, int]:
    """Return the numbers of the calls by role; nothing where no role is named."""
    roles = Counter(i.role for i in tree)
    return dict(roles) if roles.keys() - {""} else {}


def _versions(tree: InteractionTree) -> tuple[int | None, int | None]:
    """Return the first and last weight version of the tokens; they grow in each interaction."""
    sampled = [i.output_versions for i in tree if len(i.output_versions)]
    if not sampled:
        return None, None
    return int(min(v[0] for v in sampled)), int(max(v[-1] for v in sampled))


def add_to_tree(tree: InteractionTree, stored: StoredInteraction) -> None:
    """Add a stored interaction under the key by which continuations find it.

    Interactions of frozen models are left out: nothing continues, rewards or exports them.
    """
    if not is_frozen(stored.interaction):
        tree.add(stored.interaction, stored.key)


def session_age(row: SessionRow) -> float:
    """Return the seconds since a session's opening, as `seconds_since` counts them."""
    return seconds_since(row.clock, row.created_at)
