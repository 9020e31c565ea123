"""Which runs get a place, and which give theirs up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

State = Literal["idle", "starting", "running", "stopping", "failed"]
TAKE_PLACES: tuple[State, ...] = ("starting", "running", "stopping")
"""The states in which a run has a place."""
ASKED_FOR = 120.0
"""Seconds for which a run stays in the queue without another request: an agent that was told to try
again does so within them."""


class Seat(Protocol):
    """One run, as the schedule sees it. Times are monotonic seconds."""

    @property
    def state(self) -> State: ...

    @property
    def wanted_at(self) -> float | None:
        """When its place in the queue begins; None for a run that nobody waits for."""

    @property
    def account(self) -> str: ...

    @property
    def asked_at(self) -> float:
        """The last request for it."""

    @property
    def waiting(self) -> int:
        """Requests that wait for it now."""

    @property
    def started_at(self) -> float:
        """When it became ready."""

    @property
    def calls(self) -> int:
        """Requests that it answers now."""

    @property
    def ends(self) -> bool:
        """It must stop: its owner said so, or it is being removed."""

    @property
    def retry_at(self) -> float:
        """The earliest time of another start after a failure."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How long runs keep their places; see `CloudConfig`."""

    places: int
    idle_after: float
    quiet_after: float
    turn: float


S = TypeVar("S", bound=Seat)


@dataclass(slots=True)
class Plan(Generic[S]):
    """The changes to make now, and the latest time of the next look."""

    start: list[S] = field(default_factory=list)
    stop: list[S] = field(default_factory=list)
    queue: list[S] = field(default_factory=list)
    """The runs that wait for a place, the first one first."""
    again_at: float = float("inf")


def plan(seats: Iterable[S], now: float, rules: Rules) -> Plan[S]:
    """Return what to start and to stop.

    Accounts with fewer places come first, and among them those that asked first. For those that
    find no free place, first runs stop that have been quiet for `quiet_after`, then those whose
    `turn` is over, one for each.
    """
    seats = list(seats)
    out: Plan[S] = Plan()
    held = [seat for seat in seats if seat.state in TAKE_PLACES]
    waiting = [seat for seat in seats if _waits(seat, now)]
    for seat in waiting:
        times = (at for at in (seat.asked_at + ASKED_FOR, seat.retry_at) if at > now)
        out.again_at = min(out.again_at, *times, float("inf"))
    # One that failed a moment ago keeps nobody waiting.
    ready = _in_turn([s for s in waiting if s.retry_at <= now], Counter(s.account for s in held))
    free = max(0, rules.places - len(held))
    out.start, out.queue = ready[:free], ready[free:]
    running = [seat for seat in held if seat.state == "running"]
    out.stop = [seat for seat in held if seat.ends and seat.state in ("starting", "running")]
    out.stop += [s for s in running if not s.ends and _quiet_since(s, now) >= rules.idle_after]
    leaving = len(out.stop) + sum(seat.state == "stopping" for seat in held)
    short = len(out.queue) - leaving
    stay = [seat for seat in running if seat not in out.stop]
    quiet = [seat for seat in stay if _quiet_since(seat, now) >= rules.quiet_after]
    over = [s for s in stay if s not in quiet and now - s.started_at >= rules.turn]
    quiet.sort(key=lambda seat: seat.asked_at)
    over.sort(key=lambda seat: seat.started_at)
    out.stop += (quiet + over)[: max(0, short)]
    for seat in running:
        if seat not in out.stop:
            out.again_at = min(out.again_at, _leaves_at(seat, now, rules, short > 0))
    return out


def why_stopped(seat: Seat, now: float, rules: Rules) -> Literal["owner", "idle", "quiet", "turn"]:
    """Return why a plan stops a run; ``owner``: it must end."""
    if seat.ends:
        return "owner"
    quiet = _quiet_since(seat, now)
    if quiet >= rules.idle_after:
        return "idle"
    return "quiet" if quiet >= rules.quiet_after else "turn"


def _in_turn(waiting: list[S], held: Counter[str]) -> list[S]:
    """Return those that wait in the order in which they get places, by the places that each
    account has already."""
    order = []
    for seat in sorted(waiting, key=lambda seat: seat.wanted_at or 0.0):
        order.append((held[seat.account], seat))
        held[seat.account] += 1
    return [seat for _, seat in sorted(order, key=lambda pair: pair[0])]


def _waits(seat: Seat, now: float) -> bool:
    if seat.ends or seat.state not in ("idle", "failed") or seat.wanted_at is None:
        return False
    return asked_lately(seat, now)


def asked_lately(seat: Seat, now: float) -> bool:
    """Return whether its place in the queue still counts."""
    return seat.waiting > 0 or now - seat.asked_at < ASKED_FOR


def _quiet_since(seat: Seat, now: float) -> float:
    """Return the seconds without a request; none while it answers one."""
    return 0.0 if seat.calls else now - max(seat.asked_at, seat.started_at)


def _leaves_at(seat: Seat, now: float, rules: Rules, others_wait: bool) -> float:
    """Return when a run may have to leave its place, if nothing happens before."""
    quiet_from = now - _quiet_since(seat, now)
    times = [] if seat.calls else [quiet_from + rules.idle_after]
    if others_wait:
        times.append(seat.started_at + rules.turn)
        if not seat.calls:
            times.append(quiet_from + rules.quiet_after)
    return min((at for at in times if at > now), default=float("inf"))
