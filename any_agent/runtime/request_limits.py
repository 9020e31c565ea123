"""Bounds on the requests under way in a process: their number and the bytes of their bodies, of
which a share is kept for other keys than the busiest one, and the time in which a body arrives."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import TypeVar

from any_agent.errors import InvalidRequest, ServiceUnavailable, TooManyRequests

T = TypeVar("T")

MAX_REQUESTS = 8192  # those that wait for a slot or a trajectory included
MAX_BYTES = 256 * 2**20  # total size of the bodies of requests under way
_RETRY_AFTER = 2.0  # seconds
_SHARE = 2
"""A key has its share with 1/2 of a limit; beyond it only what nobody else may soon need."""
_RESERVE = 4
"""1/4 of a limit is for keys that have less than their share."""


@dataclass(slots=True)
class _Held:
    """The part of the limits that the requests of one key hold."""

    requests: int = 0
    bytes: int = 0


@dataclass(slots=True, eq=False)
class Reservation:
    """One request's part of the limits, until it is answered."""

    limits: RequestLimits
    size: int = 0
    """Bytes of its body so far."""
    _key: str | None = None
    _held: _Held | None = None

    def charge_to(self, key: str) -> None:
        """Count the request for its key; TooManyRequests if the rest is for other keys.

        The operator's and the run's own requests are charged to no key.
        """
        limits = self.limits
        held = limits.held.setdefault(key, _Held())
        used = limits.requests - 1
        if held.requests and _crowds_out(held.requests, used, 1, limits.max_requests):
            raise self._too_much(f"{held.requests} requests")
        held.requests += 1
        self._key, self._held = key, held

    def add(self, size: int) -> None:
        """Count more bytes of the body.

        ServiceUnavailable if all bodies together are too large, TooManyRequests if those of the key
        are. A request that is alone is bounded by the limit of bodies only.
        """
        limits, held = self.limits, self._held
        if limits.bytes + size > limits.max_bytes and limits.bytes > self.size:
            raise ServiceUnavailable(
                f"requests of {limits.bytes} bytes are under way here; try again",
                code="too_many_bytes",
                retry_after=_RETRY_AFTER,
            )
        if held is not None:
            crowds_out = _crowds_out(held.bytes, limits.bytes, size, limits.max_bytes)
            if crowds_out and held.bytes > self.size:
                raise self._too_much(f"requests of {held.bytes} bytes")
            held.bytes += size
        limits.bytes += size
        self.size += size

    def release(self) -> None:
        self.limits.bytes -= self.size
        self.limits.requests -= 1
        if self._held is not None and self._key is not None:
            self._held.requests -= 1
            self._held.bytes -= self.size
            if not self._held.requests:
                del self.limits.held[self._key]

    def _too_much(self, what: str) -> TooManyRequests:
        return TooManyRequests(
            f"{what} of this key are under way here, and the places that are left are for other "
            "keys; wait for some of them and try again",
            code="too_many_of_key",
            retry_after=_RETRY_AFTER,
        )


def _crowds_out(held: int, used: int, more: int, limit: int) -> bool:
    """Return whether a key that holds so much of what is used gets no more of a limit.

    So a key that is alone is not bounded by its share, and never leaves the others without any.
    """
    return held + more > limit // _SHARE and used + more > limit - limit // _RESERVE


@dataclass(slots=True, eq=False)
class RequestLimits:
    """The requests under way in one process.

    The parts behind have narrower bounds; these hold before them, as when very many clients wait or
    send large bodies at once. The answer to a refused request says when to retry.
    """

    max_requests: int = MAX_REQUESTS
    max_bytes: int = MAX_BYTES
    requests: int = 0
    bytes: int = 0
    held: dict[str, _Held] = field(default_factory=dict)
    """The parts that are held by each key's requests."""

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


class BodyTimeout:
    """The seconds in which each part of a body must arrive, and all of it together."""

    __slots__ = ("_deadline", "_part", "_whole", "_whole_name")

    def __init__(
        self, *, part: float, whole: float, whole_name: str = "server.body_timeout"
    ) -> None:
        self._part = part
        self._whole = whole
        self._whole_name = whole_name
        self._deadline: float | None = None

    async def within(self, part: Awaitable[T]) -> T:
        """Await the next part; InvalidRequest if it, or the whole, takes too long.

        The first wait begins the time of the whole.
        """
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self._deadline is None:
            self._deadline = now + self._whole
        try:
            async with asyncio.timeout_at(min(now + self._part, self._deadline)):
                return await part
        except TimeoutError:
            if loop.time() < self._deadline:
                message = f"no part of the body arrived for {self._part:g} s"
            else:
                message = f"the body did not arrive within {self._whole_name} ({self._whole:g} s)"
        raise InvalidRequest(f"{message}; send it again", code="body_timeout")
