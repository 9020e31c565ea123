"""How many model calls one rank takes at once: a call without a place is refused, never queued.

A call holds its place from before its body is read until its answer is sent: also while it is
rendered, waits for the engine, for a weight update, for the journal, or for an earlier call that it
repeats. So no more than ``limit`` calls ever wait anywhere behind it. Each choice of a call with
several is a sample for the engine, so such a call takes as many places.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from any_agent.errors import InvalidRequest, TooManyRequests

_QUEUED_PER_SLOT = 1
"""Calls that may wait in the engine for each one that it samples. They keep it busy; more would
only wait longer: the time of an admitted call is bounded by this."""


class CallSlot:
    """One place, held by whoever waits for a call's answer and by the call itself."""

    __slots__ = ("_holders", "_inflight", "_width")

    def __init__(self, inflight: ConcurrencyLimit) -> None:
        self._inflight = inflight
        self._holders = 1
        self._width = 1

    def widen(self, choices: int) -> None:
        """The call asks the engine for so many samples at once; TooManyRequests if there is no room
        for all, InvalidRequest if there never is."""
        if choices > self._inflight.limit:
            raise InvalidRequest(
                f"{choices} choices are more than the {self._inflight.limit} samples that are "
                "taken here at once; ask for fewer",
                param="n",
            )
        self._inflight.take(choices - self._width)
        self._width = choices

    def hold(self) -> None:
        """Another one needs it, who will leave it, too."""
        self._holders += 1

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Others have it meanwhile: its holder waits for something else than the engine.

        TooManyRequests afterwards, if there is none any more.
        """
        width, self._width = self._width, 0
        self._inflight.taken -= width
        yield
        self._inflight.take(width)
        self._width = width

    def leave(self) -> None:
        """Not needed here any more; it is free when nobody needs it."""
        self._holders -= 1
        if self._holders == 0:
            self._inflight.taken -= self._width


class ConcurrencyLimit:
    """The places of one rank."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self.refused = 0
        """Calls that there was no place for."""

    def enter(self) -> CallSlot:
        """Take a place; TooManyRequests if there is none."""
        self.take(1)
        return CallSlot(self)

    def take(self, more: int) -> None:
        """Room for more samples; TooManyRequests if there is none."""
        if self.taken + more > self.limit:
            self.refused += 1
            raise TooManyRequests(
                f"{self.limit} model calls are under way here, as many as the engine keeps up "
                "with; try again",
                code="too_many_calls",
                retry_after=1,
            )
        self.taken += more


def most_calls(limit: int, *, slots: int | None, sessions: int) -> int:
    """Calls that a rank takes at once.

    ``limit`` is the configured one, ``slots`` what the engine samples at once (None: it does not
    say), ``sessions`` the train sessions that may be open, each of which has room for a call.
    """
    if slots is None:
        return limit
    return min(limit, max(slots * (1 + _QUEUED_PER_SLOT), sessions))
