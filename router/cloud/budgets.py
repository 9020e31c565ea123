"""Budgets of accounts: what an account may use in a day, a month or at all.

What is used is the bill (:mod:`router.cloud.metering`). It is read again every few seconds while a
run of the account has a place, so an account can use more than its budget by what its runs do
within them.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Container
from datetime import UTC, date, datetime, timedelta
from typing import Any, NamedTuple

from pydantic import ValidationError

from any_agent.config.cloud import Budget, CloudConfig
from any_agent.errors import BudgetExhausted
from router.cloud.jobs import Jobs
from router.cloud.metering import Metering, total_of
from router.cloud.store import RunStore

log = logging.getLogger(__name__)

CHECK_EVERY = 5.0
"""Seconds between two looks at the bills of accounts that have a budget."""
_STOPPING = frozenset(("trained_tokens", "steps", "place_seconds", "gpu_seconds"))
"""Numbers that a run uses without any call: where one is used up, its account's runs stop."""
_META = "budget "


class _Period(NamedTuple):
    """The days that a budget is for; ``ends`` is the first one after them, None without an end."""

    first: str
    last: str
    ends: str | None


def period_of(budget: Budget, today: date) -> _Period:
    """Return the present period of a budget, by UTC."""
    if budget.per == "total":
        return _Period(date.min.isoformat(), date.max.isoformat(), None)
    first, after = today, today + timedelta(days=1)
    if budget.per == "month":
        first = today.replace(day=1)
        after = (first + timedelta(days=31)).replace(day=1)
    return _Period(first.isoformat(), (after - timedelta(days=1)).isoformat(), after.isoformat())


class Budgets:
    """The budgets of all accounts, and which of them are used up."""

    def __init__(
        self, config: CloudConfig, store: RunStore, metering: Metering, jobs: Jobs
    ) -> None:
        self._default = config.budget
        self._store = store
        self._metering = metering
        self._jobs = jobs
        self._own: dict[str, Budget] = {}
        self._exhausted: dict[str, BudgetExhausted] = {}
        self._day: date | None = None
        """The day of the last look at all accounts."""
        self._active: dict[str, str] = {}
        """The runs that had a place at the last look, with their accounts."""

    async def load(self) -> None:
        """Read the budgets, and judge them by the bills as they are stored."""
        rows = await self._store.read(
            "SELECT substr(name, ?), value FROM meta WHERE name GLOB ?",
            (len(_META) + 1, f"{_META}*"),
        )
        for account, value in rows:
            try:
                self._own[account] = Budget.model_validate_json(value)
            except ValidationError as error:
                log.error("the budget of %s is not one, and nothing is allowed: %s", account, error)
                self._own[account] = Budget(calls=0, per="total")
        billed = await self._store.read("SELECT DISTINCT account FROM billed", ())
        for account in {*self._own, *(name for (name,) in billed)}:
            await self._judge(account)

    async def put(self, account: str, budget: Budget | None) -> None:
        """Store an account's own budget, None for the default one, and act on it."""
        if budget is None:
            await self._store.drop_meta(_META + account)
            self._own.pop(account, None)
        else:
            await self._store.put_meta(_META + account, budget.model_dump(mode="json"))
            self._own[account] = budget
        await self._look(account)

    def of(self, account: str) -> Budget | None:
        """Return an account's budget; None without one."""
        return self._own.get(account, self._default)

    async def view(self, account: str) -> dict[str, Any] | None:
        """Return an account's budget with what of it is used; None without one."""
        used = await self._look(account)
        if (budget := self.of(account)) is None:
            return None
        return {
            "per": budget.per,
            "ends": period_of(budget, _today()).ends,
            "limits": budget.limits,
            "used": {name: used[name] for name in budget.limits},
            "left": {name: max(0, most - used[name]) for name, most in budget.limits.items()},
            "exhausted": (e := self._exhausted.get(account)) and e.details["number"],
        }

    def require(self, account: str) -> None:
        """Raise BudgetExhausted for an account that has used up its budget."""
        if (error := self._exhausted.get(account)) is not None:
            # The same one each time: it must not gather all their tracebacks.
            raise error.with_traceback(None)

    async def keep(self) -> None:
        """Look at the bills until it is cancelled."""
        while True:
            began = time.monotonic()
            await self._round()
            # Large runs take a while to read: at most a tenth of the time.
            await asyncio.sleep(max(CHECK_EVERY, 9 * (time.monotonic() - began)))

    async def _round(self) -> None:
        active = {j.run.id: j.account for j in self._jobs.by_id.values() if j.takes_place}
        # Those of the last look, too: a run counts until it has ended.
        runs = active | self._active
        looked, failed = set(runs.values()), False
        if (today := _today()) != self._day:
            # A new period may have begun; after a start, what runs did meanwhile is not known.
            looked = self._all()
        for account in looked:
            try:
                await self._look(account, runs.keys() if self._day else None)
            except sqlite3.Error as error:
                log.warning("the budget of %s cannot be checked: %s", account, error)
                failed = True
        if not failed:
            self._active, self._day = active, today

    def _all(self) -> set[str]:
        """Return the accounts that may have used up a budget."""
        of_runs = (job.account for job in self._jobs.by_id.values())
        return {*self._own, *self._exhausted, *of_runs}

    async def _look(self, account: str, runs: Container[str] | None = None) -> dict[str, Any]:
        """Judge an account by what these of its runs, None: all, have counted by now; return as
        :meth:`_judge`."""
        if self.of(account) is not None:
            for job in self._jobs.of_account(account):
                if runs is None or job.run.id in runs:
                    try:
                        await self._metering.copy(job.run, job.usage)
                    except Exception:
                        # A broken folder must not let others, or its account, use more.
                        log.warning("what %s has used is not known", job.run.name, exc_info=True)
        return await self._judge(account)

    async def _judge(self, account: str) -> dict[str, Any]:
        """Find out whether an account's budget is used up, and stop or release its runs; return
        what is used of it, {} without one."""
        error, used = None, {}
        while (budget := self.of(account)) is not None:
            used = await self._used(account, budget)
            if budget is self.of(account):
                break
        if budget is not None:
            over = [name for name, limit in budget.limits.items() if used[name] >= limit]
            # One that stops runs is the one to tell.
            over.sort(key=lambda name: name not in _STOPPING)
            if over:
                error = _exhausted(account, budget, over[0], used[over[0]])
        if error is None:
            self._exhausted.pop(account, None)
        else:
            self._exhausted[account] = error
        stops = error is not None and error.details["number"] in _STOPPING
        self._jobs.halt(account, error if stops else None)
        return used

    async def _used(self, account: str, budget: Budget) -> dict[str, Any]:
        first, last, _ = period_of(budget, _today())
        bills = await self._metering.bill(account, first, last, own=True)
        return total_of(bill["total"] for bill in bills)


def _today() -> date:
    return datetime.fromtimestamp(time.time(), UTC).date()


def _exhausted(account: str, budget: Budget, name: str, used: float) -> BudgetExhausted:
    limit, ends = budget.limits[name], period_of(budget, _today()).ends
    each = {"day": " a day", "month": " a month", "total": ""}[budget.per]
    then = f"it begins anew on {ends} (UTC), or " if ends else ""
    return BudgetExhausted(
        f"the budget of the account {account}, {limit:.15g} {name}{each}, is used up "
        f"({used:.15g}): {then}the operator raises it (PUT /rl/v1/accounts/{account}/budget)",
        details={"number": name, "used": used, "limit": limit, "ends": ends},
    )
