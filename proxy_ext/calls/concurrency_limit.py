"""The bound on one rank's concurrent model calls: a call without a slot is refused, never queued.

A call occupies its slot from before its body is read until its answer is sent: also while it is
rendered, waits for the engine, for a weight update, for the journal, or for an earlier call that it
repeats. So no more than ``limit`` calls ever wait anywhere behind it. Each choice of a call with
several is a sample for the engine, so such a call occupies as many slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from any_agent.errors import InvalidRequest, TooManyRequests

_QUEUED_PER_SAMPLE = 1
"""Calls that may wait in the engine for each one that it samples. They keep it busy; more would
only wait longer, and the time of an admitted call is bounded by this."""


class CallSlot:
    """A call's share of the limit, owned by the client that waits and by the call itself."""

    __slots__ = ("_limit", "_owners", "_samples")

    def __init__(self, limit: ConcurrencyLimit) -> None:
        self._limit = limit
        self._owners = 1
        self._samples = 1

    def grow(self, choices: int) -> None:
        """Make room for all choices of a call: TooManyRequests if there is none now, InvalidRequest
        if there never is."""
        if choices > self._limit.limit:
            raise InvalidRequest(
                f"{choices} choices are more than the {self._limit.limit} samples that this rank "
                "takes at once; request fewer",
                param="n",
            )
        self._limit.reserve(choices - self._samples)
        self._samples = choices

    def share(self) -> None:
        """Add an owner, which releases the slot as well."""
        self._owners += 1

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Give the slot to other calls while its owner waits for something else than the engine.

        TooManyRequests afterwards, if none is free then.
        """
        samples, self._samples = self._samples, 0
        self._limit.in_use -= samples
        yield
        self._limit.reserve(samples)
        self._samples = samples

    def release(self) -> None:
        """Remove an owner; the slot is free when it has none."""
        self._owners -= 1
        if self._owners == 0:
            self._limit.in_use -= self._samples


class ConcurrencyLimit:
    """The call slots of one rank."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_use = 0
        self.refused = 0

    def acquire(self) -> CallSlot:
        """Return a slot; TooManyRequests if none is free."""
        self.reserve(1)
        return CallSlot(self)

    def reserve(self, samples: int) -> None:
        """Count further samples; TooManyRequests if the limit has no room for them."""
        if self.in_use + samples > self.limit:
            self.refused += 1
            raise TooManyRequests(
                f"this rank has {self.limit} model calls under way, as many as its engine keeps up "
                "with; try again",
                code="too_many_calls",
                retry_after=1,
            )
        self.in_use += samples


def call_limit(limit: int, *, slots: int | None, sessions: int) -> int:
    """Return how many calls a rank takes at once.

    ``limit`` is the configured one, ``slots`` what the engine samples at once (None: unknown),
    ``sessions`` the train sessions that may be open, each of which has room for a call.
    """
    if slots is None:
        return limit
    return min(limit, max(slots * (1 + _QUEUED_PER_SAMPLE), sessions))
