"""Bounds on one process: the number of requests under way, and the bytes of their bodies.

The parts behind have narrower bounds; these hold before them, as when very many clients wait or
send large bodies at once. A refused request is told when to retry.
"""

from __future__ import annotations

from any_agent.errors import ServiceUnavailable

MAX_REQUESTS = 8192  # those that wait for a slot or a trajectory included
MAX_BYTES = 256 * 2**20  # total size of the bodies of requests under way
_RETRY_AFTER = 2.0  # seconds


class Reservation:
    """The share of one request until it is answered."""

    __slots__ = ("_limits", "_size")

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self._size = 0

    def add(self, size: int) -> None:
        """Count more bytes of the body; ServiceUnavailable if all bodies together are too large."""
        limits = self._limits
        # A single request is bounded by the limit of bodies alone.
        if limits.bytes + size > limits.max_bytes and limits.bytes > self._size:
            raise ServiceUnavailable(
                f"requests of {limits.bytes} bytes are under way here; try again",
                code="too_many_bytes",
                retry_after=_RETRY_AFTER,
            )
        limits.bytes += size
        self._size += size

    def release(self) -> None:
        """End the request's share."""
        self._limits.bytes -= self._size
        self._limits.requests -= 1


class RequestLimits:
    """The requests under way in one process."""

    def __init__(self, max_requests: int = MAX_REQUESTS, max_bytes: int = MAX_BYTES) -> None:
        self.max_requests = max_requests
        self.max_bytes = max_bytes
        self.requests = 0
        self.bytes = 0

    def acquire(self) -> Reservation:
        """Count a new request; ServiceUnavailable if there are too many."""
        if self.requests >= self.max_requests:
            raise ServiceUnavailable(
                f"{self.requests} requests are under way here; try again",
                code="too_many_requests",
                retry_after=_RETRY_AFTER,
            )
        self.requests += 1
        return Reservation(self)
