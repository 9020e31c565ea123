"""When to look at what again: a heap, so that waiting costs nothing, however many wait."""

from __future__ import annotations

import heapq
import math

_SPARE = 1024


class DeadlineQueue:
    """Ids by the time at which each is due.

    An id is due at the last time that it was added with. Adding it anew costs O(log n); an old
    place of it in the heap is skipped when its turn comes, or thrown out with its like before they
    are more than the rest.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._due: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._due)

    def add(self, id: str, at: float) -> None:
        """Due at ``at`` (monotonic), instead of what was said before; inf: never."""
        if math.isinf(at):
            self._due.pop(id, None)
        elif self._due.get(id) != at:
            self._due[id] = at
            heapq.heappush(self._heap, (at, id))
            if len(self._heap) > 2 * len(self._due) + _SPARE:
                self._heap = [(at, id) for id, at in self._due.items()]
                heapq.heapify(self._heap)

    def discard(self, id: str) -> None:
        """Not waited for any more."""
        self._due.pop(id, None)

    def pop(self, now: float) -> list[str]:
        """Those that are due, earliest first; they are no longer waited for."""
        out = []
        while self._heap and self._heap[0][0] <= now:
            at, id = heapq.heappop(self._heap)
            if self._due.get(id) == at:
                del self._due[id]
                out.append(id)
        return out
