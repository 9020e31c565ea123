"""How much one process takes in at once: requests under way, and the bytes of their bodies.

Each part behind has narrower bounds of its own; these hold for what comes before them, as when very
many clients wait, or send large bodies at once. Who is too much is told so, and when to come again.
"""

from __future__ import annotations

from any_agent.errors import ServiceUnavailable

MAX_REQUESTS = 8192
"""Requests under way at once, those that wait for a slot or a trajectory included."""
MAX_BYTES = 256 * 2**20
"""Of the bodies of requests under way, together."""
_RETRY_AFTER = 2.0


class Reservation:
    """What one request holds until it is answered."""

    __slots__ = ("_bounds", "_size")

    def __init__(self, bounds: RequestLimits) -> None:
        self._bounds = bounds
        self._size = 0

    def add(self, size: int) -> None:
        """Take in some bytes more; ServiceUnavailable if that is too much at once."""
        bounds = self._bounds
        # One that is alone is bounded by the limit of bodies.
        if bounds.bytes + size > bounds.most_bytes and bounds.bytes > self._size:
            raise ServiceUnavailable(
                f"requests of {bounds.bytes} bytes are under way; try again",
                code="too_many_bytes",
                retry_after=_RETRY_AFTER,
            )
        bounds.bytes += size
        self._size += size

    def leave(self) -> None:
        """It is answered."""
        self._bounds.bytes -= self._size
        self._bounds.requests -= 1


class RequestLimits:
    """The requests of one process."""

    def __init__(self, most_requests: int = MAX_REQUESTS, most_bytes: int = MAX_BYTES) -> None:
        self.most_requests = most_requests
        self.most_bytes = most_bytes
        self.requests = 0
        self.bytes = 0

    def enter(self) -> Reservation:
        """Begin a request; ServiceUnavailable if there are too many."""
        if self.requests >= self.most_requests:
            raise ServiceUnavailable(
                f"{self.requests} requests are under way here; try again",
                code="too_many_requests",
                retry_after=_RETRY_AFTER,
            )
        self.requests += 1
        return Reservation(self)
