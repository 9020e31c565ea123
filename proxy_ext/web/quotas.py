"""What one tenant may use of a rank: open sessions, requests a second, tokens a second.

Rates are token buckets on the monotonic clock, full at first and after some seconds of rest. A
call's tokens are known when it has ended, so they are taken then and the bucket may go below zero:
further calls are refused until it is positive again. Whoever is refused takes nothing from anybody:
no place among the calls under way, none in the queue for slots.

A limit is for the whole service, and a rank does not know what the others do: each enforces its
share of it, rounded up.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from any_agent.config import ServerConfig
from any_agent.errors import TooManyRequests

QUOTAS = ("open_sessions", "requests_per_second", "tokens_per_second")
_BURST_SECONDS = 5.0
"""Seconds of its rate that a tenant may use at once after a rest."""
_MAX_WAIT = 60.0
"""The largest Retry-After, in seconds: SDKs of models take no heed of larger ones."""
_UNTIL_A_SESSION_ENDS = 5.0
_MAX_BUCKETS = 4096


@dataclass(frozen=True, slots=True)
class QuotaLimits:
    """Of one tenant over all ranks; None: unlimited."""

    open_sessions: int | None = None
    requests_per_second: float | None = None
    tokens_per_second: float | None = None

    @classmethod
    def of(cls, server: ServerConfig) -> QuotaLimits:
        """What a tenant has that was given none of its own."""
        return cls(
            server.tenant_open_sessions,
            server.tenant_requests_per_second,
            server.tenant_tokens_per_second,
        )

    def share(self, ranks: int) -> QuotaLimits:
        """What each rank enforces."""

        def part(limit: float | None) -> int | None:
            return None if limit is None else math.ceil(limit / ranks)

        return QuotaLimits(
            part(self.open_sessions), part(self.requests_per_second), part(self.tokens_per_second)
        )


class TokenBucket:
    """Fills with ``rate`` a second up to a burst; may be overdrawn."""

    __slots__ = ("_at", "_level", "rate")

    def __init__(self, rate: float, now: float) -> None:
        self.rate = rate
        self._level = self.most
        self._at = now

    @property
    def most(self) -> float:
        return max(1.0, self.rate * _BURST_SECONDS)

    def level(self, now: float) -> float:
        self._level = min(self.most, self._level + self.rate * (now - self._at))
        self._at = now
        return self._level

    def take(self, amount: float, now: float) -> None:
        self._level = self.level(now) - amount

    def wait(self, wanted: float, now: float) -> float:
        """Seconds until there is as much as wanted."""
        return max(0.0, wanted - self.level(now)) / self.rate


class TenantQuotas:
    """The quotas of every tenant at one rank. ``limits`` tells a tenant's, over all ranks."""

    def __init__(
        self,
        limits: Callable[[str], QuotaLimits],
        *,
        ranks: int,
        open_sessions: Callable[[str], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._ranks = ranks
        self._open_sessions = open_sessions
        self._clock = clock
        self._buckets: dict[tuple[str, str], TokenBucket] = {}
        self._opening: Counter[str] = Counter()
        """Sessions that are being opened, also those that wait for a slot."""
        self.refused: Counter[str] = Counter()
        """Requests refused, by the quota's name."""

    def charge_request(self, tenant: str | None) -> None:
        """Count one request of a tenant; TooManyRequests (`quota_exceeded`) beyond its quota.

        ``tenant`` None is the operator, who has no quotas.
        """
        if tenant is None:
            return
        limits = self._limits(tenant).share(self._ranks)
        now = self._clock()
        bucket = self._bucket("requests_per_second", tenant, limits.requests_per_second, now)
        if bucket is None:
            return
        if wait := bucket.wait(1.0, now):
            raise self._exceeded("requests_per_second", tenant, limits.requests_per_second, wait)
        bucket.take(1.0, now)

    def require_tokens(self, tenant: str | None) -> None:
        """A call may cost tokens; TooManyRequests while the tenant owes some."""
        if tenant is None:
            return
        limit = self._limits(tenant).share(self._ranks).tokens_per_second
        now = self._clock()
        bucket = self._bucket("tokens_per_second", tenant, limit, now)
        if bucket is not None and bucket.level(now) <= 0:
            # A token of its own is what lets the next call in.
            raise self._exceeded("tokens_per_second", tenant, limit, bucket.wait(1.0, now))

    def charge_tokens(self, tenant: str | None, number: int) -> None:
        """Charge the tokens of a call that has ended, prompt and output."""
        if tenant is None:
            return
        limit = self._limits(tenant).share(self._ranks).tokens_per_second
        now = self._clock()
        bucket = self._bucket("tokens_per_second", tenant, limit, now)
        if bucket is not None:
            bucket.take(number, now)

    def begin_open(self, tenant: str | None) -> None:
        """A session is to be opened; TooManyRequests if the tenant has as many as it may.

        `end_open` must follow. What waits for a slot counts, so that nobody fills the queue.
        """
        if tenant is None:
            return
        limit = self._limits(tenant).share(self._ranks).open_sessions
        if limit is not None and self._open_sessions(tenant) + self._opening[tenant] >= limit:
            raise self._exceeded("open_sessions", tenant, limit, _UNTIL_A_SESSION_ENDS)
        self._opening[tenant] += 1

    def begin_group(self, tenant: str | None, unfilled: int) -> None:
        """A group is to be begun, for which slots are kept; TooManyRequests if as many of the
        tenant's groups lack members as it may have sessions open.

        Else one could keep every slot to itself, by groups whose only session it has ended.
        """
        if tenant is None:
            return
        limit = self._limits(tenant).share(self._ranks).open_sessions
        if limit is not None and unfilled >= limit:
            raise self._exceeded("open_sessions", tenant, limit, _UNTIL_A_SESSION_ENDS)

    def end_open(self, tenant: str | None) -> None:
        """The open has ended: its session is counted among the open ones, or there is none."""
        if tenant is not None:
            self._opening[tenant] -= 1
            if not self._opening[tenant]:
                del self._opening[tenant]

    def _bucket(
        self, quota: str, tenant: str, rate: float | None, now: float
    ) -> TokenBucket | None:
        """The tenant's bucket at the rate that is in force; None if it is unlimited."""
        key = (quota, tenant)
        if rate is None:
            self._buckets.pop(key, None)
            return None
        bucket = self._buckets.get(key)
        if bucket is None:
            if len(self._buckets) >= _MAX_BUCKETS:
                self._forget_full(now)
            bucket = self._buckets[key] = TokenBucket(rate, now)
        elif bucket.rate != rate:
            # What was used stays used.
            bucket.level(now)
            bucket.rate = rate
        return bucket

    def _forget_full(self, now: float) -> None:
        """A full bucket is like a new one. Those that are not full fill up in bounded time."""
        self._buckets = {k: b for k, b in self._buckets.items() if b.level(now) < b.most}

    def _exceeded(
        self, quota: str, tenant: str, limit: float | None, wait: float
    ) -> TooManyRequests:
        self.refused[quota] += 1
        where = f" on each of {self._ranks} ranks" if self._ranks > 1 else ""
        return TooManyRequests(
            f"tenant {tenant} has used up its quota {quota} ({limit:g}{where}); "
            "wait as long as Retry-After says",
            code="quota_exceeded",
            retry_after=min(max(1.0, wait), _MAX_WAIT),
            details={"quota": quota},
        )
