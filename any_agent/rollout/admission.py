"""The admission of train sessions by staleness, and the division of free slots among ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from any_agent.config import RolloutConfig
from any_agent.protocol.training import Capacity


def free_slots(now: Capacity, config: RolloutConfig) -> int:
    """Return how many sessions may be opened on top of the present ones.

    ``min(max_concurrent - running, (eta + 1) * batch_size - (running + buffered))``: a session
    that is admitted now is trained on at most eta steps after its weights. Slots that open groups
    have reserved count as running.
    """
    return _room(now.running + now.reserved, now.buffered, config.batch_size, config)


def _room(running: int, buffered: int, batch_sessions: int, config: RolloutConfig) -> int:
    """Return the result of :func:`free_slots`' formula, with all arguments in sessions."""
    ahead = (config.eta + 1) * batch_sessions
    return max(0, min(config.max_concurrent - running, ahead - (running + buffered)))


def stalled(now: Capacity, config: RolloutConfig) -> bool:
    """Return True if no batch is complete, and nothing is under way that could complete one.

    Groups that closed with fewer members can leave less room than the next group needs: that group
    must be admitted nevertheless, or nothing would ever continue.
    """
    return now.running + now.reserved == 0 and now.buffered < config.batch_size


class RolloutCounts:
    """Counts an executor's sessions, which decide on admission; used on its event loop alone."""

    def __init__(self, config: RolloutConfig) -> None:
        self._config = config
        self.admitted = 0
        """The number of train sessions that ever began."""
        self.running = 0
        self.buffered = 0
        """Sessions that ended with a result to train on, and are not settled yet."""
        self.evaluating = 0
        """Running eval sessions; they have their own bound, as they are never trained on."""

    def begin(self, sessions: int, *, is_eval: bool) -> None:
        if is_eval:
            self.evaluating += sessions
            return
        self.admitted += sessions
        self.running += sessions

    def end(self, *, is_eval: bool, buffered: bool) -> None:
        """Count the end of one session, which is ``buffered`` if it may be trained on."""
        if is_eval:
            self.evaluating -= 1
            return
        self.running -= 1
        self.buffered += buffered

    def settle(self, sessions: int) -> None:
        """Remove buffered sessions that were trained on, or never will be."""
        self.buffered -= sessions

    def admits(self, sessions: int, batch_sessions: int, *, wanted: int = 0) -> bool:
        """Return True if so many more sessions may begin.

        ``wanted`` are sessions that a caller waits for beyond those that training runs ahead. One
        group without room begins where otherwise nothing would ever continue.
        """
        free = _room(self.running, self.buffered - wanted, batch_sessions, self._config)
        stuck = self.running == 0 and self.buffered < batch_sessions + wanted
        return sessions <= free or stuck

    def admits_eval(self, sessions: int) -> bool:
        return self.evaluating == 0 or self.evaluating + sessions <= self._config.max_concurrent

    def capacity(self) -> Capacity:
        """Return the counts as a rank of a service reports them."""
        return Capacity(
            admitted=self.admitted,
            reserved=0,
            waiting=0,
            running=self.running,
            buffered=self.buffered,
            limit=self._config.max_concurrent,
        )


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank at its last reply, since which it can have admitted no more than ``limit``
    allows."""

    now: Capacity
    limit: int
    """The highest limit that may be in force on the rank."""
    away: bool = False
    """True if the rank does not reply, so that its limit can be neither lowered nor raised."""
    serves: bool = True
    """False if the rank takes no new sessions: it is to have no headroom."""

    @property
    def headroom(self) -> int:
        """The sessions that the rank may still admit by itself."""
        return max(0, self.limit - self.now.admitted)


def total(views: Sequence[RankView]) -> Capacity:
    """Return the sum of all ranks; the headroom of a rank that is away counts as reserved."""
    out = Capacity(
        **{name: sum(getattr(v.now, name) for v in views) for name in _NUMBERS},
        queue=[slots for v in views for slots in v.now.queue],
        unfilled=sorted((g for v in views for g in v.now.unfilled), key=lambda g: g.closes_in),
    )
    return out.model_copy(
        update={"reserved": out.reserved + sum(v.headroom for v in views if v.away)}
    )


_NUMBERS = [name for name, field in Capacity.model_fields.items() if field.annotation is int]


def divide(views: Sequence[RankView], config: RolloutConfig, turn: int) -> tuple[list[int], int]:
    """Return the headroom that each rank is to have, and the rank whose turn is next.

    Waiting opens come first, as whole groups, rank by rank in turn. A group that does not fit yet
    keeps its turn, and the slots that become free are reserved for it: otherwise single sessions of
    another rank would take each slot before there are enough. Without waiting opens all ranks get
    the same.

    The sum is at most `free_slots` of all ranks, except for one group when nothing can continue
    otherwise (`stalled`).
    """
    now = total(views)
    free = free_slots(now, config)
    rooms = [0] * len(views)
    present = [rank for rank, view in enumerate(views) if view.serves and not view.away]
    queues = {rank: deque(views[rank].now.queue) for rank in present}
    while waiting := _from(turn, [rank for rank in present if queues[rank]]):
        rank = waiting[0]
        if queues[rank][0] > free:
            if stalled(now, config) and not any(rooms):
                rank = next((other for other in waiting if queues[other][0] <= free), rank)
                rooms[rank] = queues[rank][0]
            return rooms, turn
        slots = queues[rank].popleft()
        rooms[rank] += slots
        free -= slots
        turn = (rank + 1) % len(views)
    for k, rank in enumerate(_from(turn, present)):
        share, more = divmod(free, len(present))
        rooms[rank] += share + (k < more)
    return rooms, turn


def _from(turn: int, ranks: Sequence[int]) -> list[int]:
    return [rank for rank in ranks if rank >= turn] + [rank for rank in ranks if rank < turn]
