"""The division of free slots among ranks, as pure functions: no clock and no messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from any_agent.config import RolloutConfig
from any_agent.protocol.rl import Capacity
from any_agent.rollout.admission import free_slots, stalled


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank as its last answer showed it.

    It cannot have admitted more since than ``limit`` left it.
    """

    now: Capacity
    limit: int
    """The highest limit that may be in force there."""
    away: bool = False
    """True if the rank does not answer, so that its limit can be neither lowered nor raised."""

    @property
    def headroom(self) -> int:
        """Sessions that it may still admit by itself."""
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

    Waiting opens come first, whole groups, the ranks in turn. A group that does not fit yet keeps
    its turn, and slots that become free meanwhile are kept for it: otherwise single sessions of
    another rank would take every slot before there are enough. Without waiting opens, every rank
    gets the same.

    The sum is at most `free_slots` of all ranks, but for one group where everything stands still
    (`stalled`).
    """
    now = total(views)
    free = free_slots(now, config)
    rooms = [0] * len(views)
    present = [rank for rank, view in enumerate(views) if not view.away]
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
    """Return the ranks in the order of their turns."""
    return [rank for rank in ranks if rank >= turn] + [rank for rank in ranks if rank < turn]
