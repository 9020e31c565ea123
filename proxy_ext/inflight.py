"""How many model calls one rank takes at once: a call without a place is refused, never queued.

A call holds its place from before its body is read until its answer is sent: also while it is
rendered, waits for the engine, for a weight update, for the journal, or for an earlier call that it
repeats. So no more than ``limit`` calls ever wait anywhere behind it.
"""

from __future__ import annotations

from any_agent.errors import TooManyRequests

_QUEUED_PER_SLOT = 1
"""Calls that may wait in the engine for each one that it samples. They keep it busy; more would
only wait longer: the time of an admitted call is bounded by this."""


class InFlight:
    """The places of one rank."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self.refused = 0

    def enter(self) -> None:
        """Take a place; TooManyRequests if there is none."""
        if self.taken >= self.limit:
            self.refused += 1
            raise TooManyRequests(
                f"{self.limit} model calls are under way here, as many as the engine keeps up "
                "with; try again",
                code="too_many_calls",
                retry_after=1,
            )
        self.taken += 1

    def leave(self) -> None:
        """Give a place back."""
        self.taken -= 1


def most_calls(limit: int, *, slots: int | None, sessions: int) -> int:
    """Calls that a rank takes at once.

    ``limit`` is the configured one, ``slots`` what the engine samples at once (None: it does not
    say), ``sessions`` the train sessions that may be open, each of which has room for a call.
    """
    if slots is None:
        return limit
    return min(limit, max(slots * (1 + _QUEUED_PER_SLOT), sessions))
