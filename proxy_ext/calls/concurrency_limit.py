"""The bound on one rank's concurrent model calls: a call without a slot is refused, never queued.

A call occupies its slot from when its body has arrived until its answer is sent: also while it is
rendered, waits for the engine, for a weight update, for the journal, or for an earlier call that it
repeats. So no more than ``limit`` calls ever wait anywhere behind it. Each choice of a call with
several is a sample for the engine, so such a call occupies as many slots.

One session, or all sessions of one tenant, get half of the slots while others call, and as many as
are free while nobody else does.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from any_agent.errors import InvalidRequest, TooManyRequests

_QUEUED_PER_SAMPLE = 1
"""Calls that may wait in the engine for each one that it samples. They keep it busy; more would
only wait longer, and the time of an admitted call is bounded by this."""
_ACTIVE_SECONDS = 60.0
"""Time for which a session or a tenant that called is counted among those who call."""


class CallOwner(NamedTuple):
    """The session and the tenant of a call; None: none, and so no bound on its share."""

    session: str | None = None
    tenant: str | None = None


ANY_OWNER = CallOwner()


class CallSlot:
    """A call's share of the limit, owned by the client that waits and by the call itself."""

    __slots__ = ("_limit", "_owner", "_owners", "_samples")

    def __init__(self, limit: ConcurrencyLimit, owner: CallOwner) -> None:
        self._limit = limit
        self._owner = owner
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
        self._limit.reserve(choices - self._samples, self._owner, own=self._samples)
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
        self._limit.free(samples, self._owner)
        yield
        self._limit.reserve(samples, self._owner)
        self._samples = samples

    def release(self) -> None:
        """Remove an owner; the slot is free when it has none."""
        self._owners -= 1
        if self._owners == 0:
            self._limit.free(self._samples, self._owner)


class _Shares:
    """The slots of one kind of owner: of sessions, or of tenants."""

    __slots__ = ("_at", "_before", "_last", "held")

    def __init__(self) -> None:
        self.held: Counter[str] = Counter()
        """Slots by owner."""
        self._last: str | None = None
        """The owner of the last call; then its time, and that of the last call of another one."""
        self._at = self._before = float("-inf")

    def note(self, owner: str | None, now: float) -> None:
        """Note that an owner calls."""
        if owner != self._last:
            self._last, self._before = owner, self._at
        self._at = now

    def others_call(self, owner: str, in_use: int, now: float) -> bool:
        """Return whether somebody else has a slot, or has called lately."""
        last = self._before if owner == self._last else self._at
        return in_use > self.held[owner] or now - last < _ACTIVE_SECONDS

    def add(self, owner: str | None, samples: int) -> None:
        if owner is not None:
            self.held[owner] += samples
            if not self.held[owner]:
                del self.held[owner]


class ConcurrencyLimit:
    """The call slots of one rank."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self.in_use = 0
        self.refused = 0
        self._clock = clock
        self._sessions, self._tenants = _Shares(), _Shares()

    def acquire(self, owner: CallOwner) -> CallSlot:
        """Return a slot; TooManyRequests if the owner can have none now."""
        self.reserve(1, owner)
        return CallSlot(self, owner)

    def require_free(self, owner: CallOwner) -> None:
        """Raise TooManyRequests if the owner can have no slot now."""
        now = self._clock()
        self._sessions.note(owner.session, now)
        self._tenants.note(owner.tenant, now)
        self._require(1, owner, 0, now)

    def reserve(self, samples: int, owner: CallOwner, *, own: int = 0) -> None:
        """Count further samples of a call that has ``own``; TooManyRequests if there is no room for
        them, or the owner's other calls leave it none."""
        self._require(samples, owner, own, self._clock())
        self._add(samples, owner)

    def free(self, samples: int, owner: CallOwner) -> None:
        """Count samples no more."""
        self._add(-samples, owner)

    def _add(self, samples: int, owner: CallOwner) -> None:
        self.in_use += samples
        self._sessions.add(owner.session, samples)
        self._tenants.add(owner.tenant, samples)

    def _require(self, samples: int, owner: CallOwner, own: int, now: float) -> None:
        if self.in_use + samples > self.limit:
            raise self._refusal(
                f"this rank has {self.limit} model calls under way, as many as its engine keeps up "
                "with; try again"
            )
        share = self.limit - self.limit // 2
        if self.in_use + samples <= share:
            return
        for shares, name, kind in (
            (self._sessions, owner.session, "session"),
            (self._tenants, owner.tenant, "tenant"),
        ):
            # A call of more choices than the share is taken if it is its owner's only one.
            if (
                name is not None
                and own < shares.held[name] > share - samples
                and shares.others_call(name, self.in_use, now)
            ):
                raise self._refusal(
                    f"this {kind} has {shares.held[name]} of the {self.limit} model calls that the "
                    f"rank takes at once, and no {kind} gets more than {share} while others call; "
                    "try again"
                )

    def _refusal(self, message: str) -> TooManyRequests:
        self.refused += 1
        return TooManyRequests(message, code="too_many_calls", retry_after=1)


def call_limit(limit: int, *, slots: int | None, sessions: int) -> int:
    """Return how many calls a rank takes at once.

    ``limit`` is the configured one, ``slots`` what the engine samples at once (None: unknown),
    ``sessions`` the train sessions that may be open, each of which has room for a call.
    """
    if slots is None:
        return limit
    return min(limit, max(slots * (1 + _QUEUED_PER_SAMPLE), sessions))
