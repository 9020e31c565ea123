"""A queue of deadlines by id: a heap, so that waiting costs nothing, however many ids wait."""

from __future__ import annotations

import heapq
import math

_MAX_STALE = 1024  # outdated heap entries beyond the number of ids


class DeadlineQueue:
    """Ids by the time at which each is due.

    An id is due at the time of its last `add`, which costs O(log n). Its earlier heap entries are
    skipped when their turn comes, or dropped together before they outnumber the current ones.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._due: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._due)

    def add(self, id: str, at: float) -> None:
        """Make an id due at ``at`` (monotonic seconds), replacing its earlier time; inf: never."""
        if math.isinf(at):
            self._due.pop(id, None)
        elif self._due.get(id) != at:
            self._due[id] = at
            heapq.heappush(self._heap, (at, id))
            if len(self._heap) > 2 * len(self._due) + _MAX_STALE:
                self._heap = [(at, id) for id, at in self._due.items()]
                heapq.heapify(self._heap)

    def discard(self, id: str) -> None:
        """Remove an id."""
        self._due.pop(id, None)

    def pop(self, now: float) -> list[str]:
        """Remove and return the ids that are due, earliest first."""
        out = []
        while self._heap and self._heap[0][0] <= now:
            at, id = heapq.heappop(self._heap)
            if self._due.get(id) == at:
                del self._due[id]
                out.append(id)
        return out
