"""Tenants' quotas that are counted once for all ranks, by the Redis of `server.journal`.

What the requests of one rank ask goes in one round trip at a time: a single request takes one, and
many at once share theirs. While Redis does not answer, each rank enforces its share, as without it,
and no request waits: only `reconcile` tries whether it is back.

A tenant's open sessions are the sum of what its ranks report. A place is granted, and counted, in
one step. A session that ends is reported at once; a rank that was killed counts as it last reported
until its next process does, with the sessions that its journal has.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, TypeAlias, TypeVar

from any_agent.runtime.redis_client import FAILURES
from proxy_ext.web.quota_server import Command, QuotaServer, Rates
from proxy_ext.web.quotas import OPEN, REQUESTS, TOKENS, OpenPlace, TenantQuotas

log = logging.getLogger(__name__)

TIMEOUT = 0.25
"""Seconds that a request waits for Redis at most."""
_GRACE = 0.05  # of these, for an answer that came while the event loop was busy
_RETRY_SECONDS = 1.0  # between tries while Redis does not answer
REFRESH_SECONDS = 60.0  # after which a count is reported again, though it is the same
_FRESH_SECONDS = 1.0  # for which a level of tokens is known
_MAX_BATCH = 256  # tenants in one round trip
_MAX_LEVELS = 4096
_NOBODY = ""  # the tenant of a try, which has no limits


_T = TypeVar("_T")
_Step: TypeAlias = tuple[Command, Callable[[Any], None]]
"""A command of a round trip, and the use of its answer."""


class _Asks:
    """One tenant's requests that the next round trip answers; by None if it fails."""

    __slots__ = ("levels", "opens", "requests", "spent")

    def __init__(self) -> None:
        self.requests: list[asyncio.Future[float | None]] = []
        """Each gets the seconds until it would be admitted; 0: it is."""
        self.levels: list[asyncio.Future[float | None]] = []
        """Each gets the level of the tokens."""
        self.opens: list[asyncio.Future[bool | None]] = []
        self.spent = 0

    def give_up(self) -> None:
        futures: list[asyncio.Future[Any]] = [*self.requests, *self.levels, *self.opens]
        for future in futures:
            if not future.done():
                future.set_result(None)


class SharedQuotas(TenantQuotas):
    """Quotas of which every rank's use counts, while Redis answers.

    ``keep``: seconds after which the sessions of a rank that reports nothing must have ended.
    """

    def __init__(
        self,
        limit: Callable[[str, str], float | None],
        *,
        ranks: int,
        open_sessions: Callable[[str], int],
        server: QuotaServer,
        keep: float,
        timeout: float = TIMEOUT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(limit, ranks=ranks, open_sessions=open_sessions, clock=clock)
        self._server = server
        self._keep = max(keep, 5 * REFRESH_SECONDS)
        self.timeout = timeout
        # Until the first `reconcile` has reported the sessions that the journal has.
        self._away = True
        self._said_away: bool | None = None
        self._retry_at = -math.inf
        self._asked: dict[str, _Asks] = {}
        self._reports: dict[str, None] = {}
        """Tenants whose sessions are to be reported, oldest first."""
        self._reported: dict[str, tuple[int, float]] = {}
        """The sessions last reported of each tenant, and when; without those that have none."""
        self._levels: dict[str, tuple[float, float]] = {}
        """Levels of tokens, and when they were known."""
        self.pump: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    @property
    def exact(self) -> bool:
        return not self._away

    async def charge_request(self, tenant: str | None) -> None:
        rate = None if tenant is None or self._away else self._limit(tenant, REQUESTS)
        if tenant is not None and rate is not None:
            wait = await self._future(self._of(tenant).requests)
            if wait == 0:
                return
            if wait is not None:
                raise self._exceeded(REQUESTS, tenant, rate, wait, shared=True)
        await super().charge_request(tenant)

    async def require_tokens(self, tenant: str | None) -> None:
        rate = None if tenant is None or self._away else self._limit(tenant, TOKENS)
        if tenant is not None and rate is not None:
            level, at = self._levels.get(tenant, (0.0, -math.inf))
            age = self._clock() - at
            if age < _FRESH_SECONDS:
                # The request has just been counted, and the answer had this level.
                found: float | None = level + rate * age
            else:
                found = await self._future(self._of(tenant).levels)
            if found is not None:
                if found <= 0:
                    raise self._exceeded(TOKENS, tenant, rate, (1.0 - found) / rate, shared=True)
                return
        await super().require_tokens(tenant)

    def charge_tokens(self, tenant: str | None, number: int) -> None:
        if tenant is None or self._away or self._limit(tenant, TOKENS) is None:
            super().charge_tokens(tenant, number)
            return
        self._of(tenant).spent += number
        if tenant in self._levels:
            level, at = self._levels[tenant]
            self._levels[tenant] = level - number, at
        self._start()

    async def begin_open(self, tenant: str | None) -> OpenPlace:
        limit = None if tenant is None or self._away else self._limit(tenant, OPEN)
        if tenant is None or limit is None:
            return await super().begin_open(tenant)
        future = self._future(self._of(tenant).opens)
        try:
            granted = await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.result():
                self._end_open(tenant)
            raise
        if granted is None:
            return await super().begin_open(tenant)
        if not granted:
            raise self._exceeded(OPEN, tenant, limit, shared=True)
        # It has been counted with the answer.
        return OpenPlace(lambda: self._end_open(tenant))

    def on_decided(self, tenant: str) -> None:
        if not self._away and self._is_due(tenant, math.inf):
            self._reports[tenant] = None
            self._start()

    def reconcile(self, tenants: Iterable[str]) -> None:
        now = self._clock()
        if self._away:
            if now < self._retry_at:
                return
            self._reports[_NOBODY] = None
        refresh = 0.0 if self._away else REFRESH_SECONDS
        for tenant in {*tenants, *self._opening, *self._reported}:
            if self._is_due(tenant, refresh):
                self._reports[tenant] = None
        self._start()

    def _is_due(self, tenant: str, refresh: float) -> bool:
        """Return whether to report a tenant's sessions: they changed, or it was long ago."""
        if self._limit(tenant, OPEN) is None:
            self._reported.pop(tenant, None)
            return False
        held = self.held(tenant)
        number, at = self._reported.get(tenant, (0, math.inf))
        return held != number or self._clock() - at >= refresh

    async def close(self) -> None:
        """Send what is left, and disconnect."""
        if self.pump is not None and not self.pump.done():
            await asyncio.wait([self.pump], timeout=2 * self.timeout)
            self.pump.cancel()
        self._away = True
        self._give_up({})
        with suppress(*FAILURES):
            async with asyncio.timeout(self.timeout):
                await self._server.close()

    def _end_open(self, tenant: str) -> None:
        super()._end_open(tenant)
        self.on_decided(tenant)

    # -- round trips -------------------------------------------------------------------------------

    def _of(self, tenant: str) -> _Asks:
        """Return what a tenant asks in the next round trip."""
        return self._asked.setdefault(tenant, _Asks())

    def _future(self, among: list[asyncio.Future[_T]]) -> asyncio.Future[_T]:
        future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        among.append(future)
        self._start()
        return future

    def _start(self) -> None:
        if (self._asked or self._reports) and (self.pump is None or self.pump.done()):
            self.pump = asyncio.create_task(self._run())

    async def _run(self) -> None:
        """Send what is asked, until nothing is left."""
        if self._closing is not None:
            # It is short, and no request waits for this: Redis was away.
            await self._closing
            self._closing = None
        while self._asked or self._reports:
            asked = {name: self._asked.pop(name) for name in [*islice(self._asked, _MAX_BATCH)]}
            try:
                steps = self._steps(asked)
                answers = await self._answers([command for command, _ in steps])
                self._away = False
                for (_, on_answer), answer in zip(steps, answers, strict=True):
                    on_answer(answer)
            except Exception as error:
                self._lose(asked, error)
                return
            except BaseException:
                self._give_up(asked)
                raise
            if self._said_away is not False:
                self._said_away = False
                log.info("tenants' quotas are counted over all ranks")

    def _steps(self, asked: dict[str, _Asks]) -> list[_Step]:
        """Return the next round trip: what is asked, and some of the reports."""
        steps: list[_Step] = []
        for tenant in {**asked, **dict.fromkeys(islice(self._reports, _MAX_BATCH))}:
            asks = asked.get(tenant, _Asks())
            if asks.requests or asks.levels or asks.spent:
                command = self._server.rates(
                    tenant,
                    per_second=self._limit(tenant, REQUESTS) or 0.0,
                    wanted=len(asks.requests),
                    tokens_per_second=self._limit(tenant, TOKENS) or 0.0,
                    spent=asks.spent,
                )
                steps.append((command, partial(self._on_rates, tenant, asks)))
            # A request whose client has left asks for nothing.
            opens = [future for future in asks.opens if not future.done()]
            due = tenant in self._reports
            self._reports.pop(tenant, None)
            if opens or due:
                held, limit = self.held(tenant), self._limit(tenant, OPEN)
                command = self._server.report(
                    tenant,
                    held=held,
                    wanted=len(opens),
                    limit=None if limit is None else int(limit),
                    keep=self._keep,
                )
                steps.append((command, partial(self._on_report, tenant, held, opens)))
        return steps

    async def _answers(self, commands: list[Command]) -> list[Any]:
        """Return the answers within the time of a request; TimeoutError, or one of `FAILURES`."""
        task = asyncio.ensure_future(self._server.run(commands))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            done, _ = await asyncio.wait([task], timeout=self.timeout - _GRACE)
            if not done:
                done, _ = await asyncio.wait([task], timeout=_GRACE)
            if not done:
                raise TimeoutError(f"no answer within {self.timeout:g} s")
            return task.result()
        finally:
            task.cancel()

    def _on_rates(self, tenant: str, asks: _Asks, answer: Rates) -> None:
        now, rate = self._clock(), self._limit(tenant, REQUESTS) or 1.0
        wait = max(1e-3, (1.0 - answer.requests) / rate)
        for number, future in enumerate(asks.requests):
            if not future.done():
                future.set_result(0.0 if number < answer.admitted else wait)
        for level in asks.levels:
            if not level.done():
                level.set_result(answer.tokens)
        if self._limit(tenant, TOKENS) is not None:
            if len(self._levels) >= _MAX_LEVELS:
                self._levels.clear()
            self._levels[tenant] = answer.tokens, now
        # Should Redis go away, each rank goes on with its share of what is left.
        for quota, level_now in ((REQUESTS, answer.requests), (TOKENS, answer.tokens)):
            if (bucket := self._bucket(quota, tenant)) is not None:
                bucket.fill_to(level_now / self.ranks, now)

    def _on_report(
        self, tenant: str, held: int, opens: list[asyncio.Future[bool | None]], granted: int
    ) -> None:
        reported, left = held + granted, granted
        for future in opens:
            if not future.done():
                future.set_result(left > 0)
                if left:
                    self._opening[tenant] += 1
                    left -= 1
        self._reported[tenant] = reported, self._clock()
        if not reported:
            del self._reported[tenant]
        if self.held(tenant) != reported:
            # A client left meanwhile, or a session ended.
            self._reports[tenant] = None

    def _lose(self, asked: dict[str, _Asks], error: Exception) -> None:
        """Enforce shares until a later round trip succeeds."""
        self._retry_at = self._clock() + _RETRY_SECONDS
        self._away = True
        expected = isinstance(error, FAILURES)
        if not (self._said_away and expected):
            self._said_away = True
            log.warning(
                "tenants' quotas cannot be counted over all ranks (%s): each rank enforces its "
                "share until Redis answers again",
                error,
                exc_info=not expected,
            )
        self._give_up(asked)
        self._closing = asyncio.create_task(self._disconnect())

    def _give_up(self, asked: dict[str, _Asks]) -> None:
        """Let each request that waits for an answer be decided here."""
        later, self._asked = self._asked, {}
        self._reports.clear()
        self._levels.clear()
        for tenant, asks in (*asked.items(), *later.items()):
            asks.give_up()
            if asks.spent:
                super().charge_tokens(tenant, asks.spent)

    async def _disconnect(self) -> None:
        with suppress(*FAILURES):
            async with asyncio.timeout(self.timeout):
                await self._server.disconnect()
