"""Quotas of tenants on one rank: open sessions, requests a second, tokens a second.

Rates are token buckets on the monotonic clock, full at first and after some seconds of rest. A
call's tokens are known when it has ended, so they are charged then and the bucket may go below
zero: further calls are refused until it is positive again. A refused request takes nothing from
others: no call slot, and no place in the queue for session slots.

A limit is for the whole service. As a rank does not know the load of the others, each enforces its
share of the limit, rounded up. `proxy_ext.web.shared_quotas` counts once for all ranks instead.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Self

from any_agent.errors import TooManyRequests

OPEN, REQUESTS, TOKENS = "open_sessions", "requests_per_second", "tokens_per_second"
QUOTAS = (OPEN, REQUESTS, TOKENS)
BURST_SECONDS = 5.0
"""Seconds of its rate that a tenant may use at once after a rest."""
_MAX_RETRY_AFTER = 60.0  # seconds: SDKs ignore longer ones
_SESSION_RETRY_AFTER = 5.0  # seconds until a session may have ended
MAX_BUCKETS = 4096


class TokenBucket:
    """A bucket that fills with ``rate`` a second up to a burst; it may be overdrawn."""

    __slots__ = ("_at", "_level", "rate")

    def __init__(self, rate: float, now: float) -> None:
        self.rate = rate
        self._level = self.capacity
        self._at = now

    @property
    def capacity(self) -> float:
        return max(1.0, self.rate * BURST_SECONDS)

    def level(self, now: float) -> float:
        self._level = min(self.capacity, self._level + self.rate * (now - self._at))
        self._at = now
        return self._level

    def charge(self, amount: float, now: float) -> None:
        self._level = self.level(now) - amount

    def fill_to(self, level: float, now: float) -> None:
        self._level, self._at = level, now

    def wait(self, wanted: float, now: float) -> float:
        """Return the seconds until the level is as wanted."""
        return max(0.0, wanted - self.level(now)) / self.rate


class OpenPlace:
    """A place among a tenant's open sessions, until the session counts itself, or is not opened.

    It is released at the end of the block, unless that was done before.
    """

    def __init__(self, release: Callable[[], None]) -> None:
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        if self._release is not None:
            release, self._release = self._release, None
            release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class TenantQuotas:
    """The quotas of every tenant on one rank.

    ``limit`` returns a tenant's limit of a quota over all ranks; None: unlimited. ``open_sessions``
    returns the number of its sessions on this rank. A ``tenant`` of None is the operator, who has
    no quotas.
    """

    def __init__(
        self,
        limit: Callable[[str, str], float | None],
        *,
        ranks: int,
        open_sessions: Callable[[str], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = limit
        self.ranks = ranks
        """The ranks that share each limit."""
        self._open_sessions = open_sessions
        self._clock = clock
        self.buckets: dict[tuple[str, str], TokenBucket] = {}
        self._opening: Counter[str] = Counter()
        """Sessions that are being opened, those that wait for a slot included."""
        self.refused: Counter[str] = Counter()
        """Number of refused requests, by the quota's name."""

    @property
    def exact(self) -> bool:
        """True if every rank's use counts, False if this rank enforces its share."""
        return self.ranks == 1

    async def charge_request(self, tenant: str | None) -> None:
        """Count one request of a tenant; TooManyRequests (`quota_exceeded`) beyond its quota."""
        if (bucket := self._bucket(REQUESTS, tenant)) is not None:
            now = self._clock()
            if wait := bucket.wait(1.0, now):
                raise self._exceeded(REQUESTS, tenant, bucket.rate, wait)
            bucket.charge(1.0, now)

    async def require_tokens(self, tenant: str | None) -> None:
        """Raise TooManyRequests while a tenant has overdrawn its tokens."""
        if (bucket := self._bucket(TOKENS, tenant)) is not None:
            now = self._clock()
            if bucket.level(now) <= 0:
                # The next call is admitted at a level of one token.
                raise self._exceeded(TOKENS, tenant, bucket.rate, bucket.wait(1.0, now))

    def charge_tokens(self, tenant: str | None, number: int) -> None:
        """Charge the tokens of a call that has ended, prompt and output."""
        if (bucket := self._bucket(TOKENS, tenant)) is not None:
            bucket.charge(number, self._clock())

    async def begin_open(self, tenant: str | None) -> OpenPlace:
        """Count an open that starts; TooManyRequests if the tenant has reached its limit.

        Opens that wait for a slot count, so that no tenant fills the queue.
        """
        if tenant is None:
            return OpenPlace(lambda: None)
        self._require_sessions(tenant, self.held(tenant))
        return self._begun(tenant)

    def require_group(self, tenant: str | None, unfilled: int) -> None:
        """Check a new group, which reserves slots on this rank; TooManyRequests if as many of the
        tenant's groups lack members as this rank's share of its open sessions.

        Otherwise a tenant could reserve every slot by groups whose only session it has ended.
        """
        if tenant is not None:
            self._require_sessions(tenant, unfilled)

    def reconcile(self, tenants: Iterable[str]) -> None:
        """Compare the counts with those of the tenants that have sessions here; call it often."""

    def on_decided(self, tenant: str) -> None:
        """Learn that a session of a tenant is not open any more."""

    async def close(self) -> None: ...

    def _begun(self, tenant: str) -> OpenPlace:
        self._opening[tenant] += 1
        return OpenPlace(lambda: self._end_open(tenant))

    def _end_open(self, tenant: str) -> None:
        self._opening[tenant] -= 1
        if not self._opening[tenant]:
            del self._opening[tenant]

    def held(self, tenant: str) -> int:
        """Return the number of a tenant's sessions that are open or being opened here."""
        return self._open_sessions(tenant) + self._opening[tenant]

    def _require_sessions(self, tenant: str, taken: int) -> None:
        limit = self._share(OPEN, tenant)
        if limit is not None and taken >= limit:
            raise self._exceeded(OPEN, tenant, limit)

    def _share(self, quota: str, tenant: str) -> int | None:
        """Return this rank's share of a tenant's limit."""
        limit = self._limit(tenant, quota)
        return None if limit is None else math.ceil(limit / self.ranks)

    def _bucket(self, quota: str, tenant: str | None) -> TokenBucket | None:
        """Return a tenant's bucket at its present rate; None without a limit."""
        if tenant is None:
            return None
        key, now = (quota, tenant), self._clock()
        rate = self._share(quota, tenant)
        if rate is None:
            self.buckets.pop(key, None)
            return None
        bucket = self.buckets.get(key)
        if bucket is None:
            if len(self.buckets) >= MAX_BUCKETS:
                self._forget_full(now)
            bucket = self.buckets[key] = TokenBucket(rate, now)
        elif bucket.rate != rate:
            # The level so far is kept.
            bucket.level(now)
            bucket.rate = rate
        return bucket

    def _forget_full(self, now: float) -> None:
        """Drop full buckets, which are like new ones. Others fill up in bounded time."""
        self.buckets = {k: b for k, b in self.buckets.items() if b.level(now) < b.capacity}

    def _exceeded(
        self,
        quota: str,
        tenant: str | None,
        limit: float,
        wait: float = _SESSION_RETRY_AFTER,
        *,
        shared: bool = False,
    ) -> TooManyRequests:
        """``shared``: the limit is that of all ranks together."""
        self.refused[quota] += 1
        where = f" on each of {self.ranks} ranks" if self.ranks > 1 and not shared else ""
        return TooManyRequests(
            f"tenant {tenant} has used up its quota {quota} ({limit:g}{where}); "
            "wait for the seconds of Retry-After",
            code="quota_exceeded",
            retry_after=min(max(1.0, wait), _MAX_RETRY_AFTER),
            details={"quota": quota},
        )
