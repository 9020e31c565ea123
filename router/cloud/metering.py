"""The usage of accounts and their runs: a bill that stays when a run, or its account, is gone.

Tokens, calls, sessions and steps are counted by a run, in its own folder
(:mod:`any_agent.rundir.usage`); the cloud copies these numbers when they are asked for, and before
it removes a run. The seconds of places are the cloud's own: a row for each stay of a run in a
place, which grows while the run has the place, so that a cloud that is killed has counted all but
its last seconds.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import sqlite3
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from any_agent.rundir.usage import Days, Usage, UsageReader, day_of
from router.cloud.store import SQL, Run, RunStore

log = logging.getLogger(__name__)

NOTE_EVERY = 5.0
"""Seconds between two notes of the stays under way."""
_DAY = 86400.0
_NAMES = tuple(Usage.__dataclass_fields__)
_USAGE = f"INSERT INTO usage VALUES ({', '.join('?' * (3 + len(_NAMES)))})"
_GROWING = ("calls", "sampled_tokens", "sessions", "steps")
_BILLED = "SELECT run, account, experiment, trial FROM billed"


@dataclass(slots=True)
class _Stay:
    """One stay of a run in a place. The wall clock gives its day, another one its length."""

    run: str
    gpus: int
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    began_at: float = field(default_factory=time.time)
    since: float = field(default_factory=time.monotonic)

    def note(self) -> SQL:
        """Return the statement that stores it as long as it is now."""
        row = (self.id, self.run, self.began_at, time.monotonic() - self.since, self.gpus)
        return "INSERT OR REPLACE INTO stays VALUES (?, ?, ?, ?, ?)", row


class Metering:
    """The usage of all runs that there are or were."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._stays: dict[str, _Stay] = {}
        self._copying: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """A lock for each run: the later of two reads must be the one that stays."""

    @asynccontextmanager
    async def staying(self, run: Run, gpus: int) -> AsyncIterator[None]:
        """Count the seconds in which a run has a place."""
        stay = self._stays[run.id] = _Stay(run.id, gpus)
        try:
            await self._store.commit(lambda: None, stay.note())
            yield
        finally:
            del self._stays[run.id]
            try:
                await self._store.commit(lambda: None, stay.note())
            except sqlite3.Error as error:
                log.error("the last seconds of the run %s in its place: %s", run.id, error)

    async def keep(self) -> None:
        """Note the stays under way until it is cancelled."""
        while True:
            await asyncio.sleep(NOTE_EVERY)
            try:
                await self._note()
            except sqlite3.Error as error:
                log.warning("the seconds of places cannot be noted: %s; tried again", error)

    async def _note(self) -> None:
        if notes := [stay.note() for stay in self._stays.values()]:
            await self._store.commit(lambda: None, *notes)

    async def copy(self, run: Run, reader: UsageReader, *, last: bool = False) -> None:
        """Copy what a run has counted, as its folder has it now.

        ``last``: the folder goes, so sqlite3.Error is raised where another try may succeed.
        """
        async with self._copying.setdefault(run.id, asyncio.Lock()):
            found = await asyncio.to_thread(reader.read, last=last)
            for part, days in found.items():
                try:
                    await self._replace(run.id, part, days)
                except sqlite3.Error as error:
                    if last:
                        raise
                    log.warning("the bill of the run %s cannot be stored: %s", run.id, error)

    async def _replace(self, run: str, part: str, days: Days) -> None:
        values = (run, part)
        sql = f"SELECT day, {', '.join(_NAMES)} FROM usage WHERE run = ? AND part = ?"
        stored = {day: Usage(*row) for day, *row in await self._store.read(sql, values)}
        if days == stored:
            return
        old, new = (sum(each.values(), Usage()) for each in (stored, days))
        if any(getattr(new, name) < getattr(old, name) for name in _GROWING):
            # Neither a journal nor the steps forget what they have counted, unless something has
            # damaged them.
            log.error("the run %s has lost usage of %s: its bill keeps it", run, part)
            return
        put: list[SQL] = [
            (_USAGE, (run, part, day, *asdict(usage).values())) for day, usage in days.items()
        ]
        drop = ("DELETE FROM usage WHERE run = ? AND part = ?", values)
        await self._store.commit(lambda: None, *([drop] if stored else []), *put)

    async def begin_account(self, account: str) -> None:
        """Hide the bills of earlier accounts of a name from the one that is made."""
        ((last,),) = await self._store.read("SELECT COALESCE(MAX(rowid), 0) FROM billed", ())
        await self._store.put_meta(f"began {account}", last)

    async def bill(
        self, account: str | None, first: str, last: str, *, own: bool
    ) -> list[dict[str, Any]]:
        """Return what accounts (None: all) have used from one day to another, both included.

        ``own``: without the runs of an earlier account of this name.
        """
        try:
            await self._note()
        except sqlite3.Error as error:
            log.warning("the seconds of places cannot be noted: %s", error)
        after = (await self._store.meta(f"began {account}") or 0) if own else 0
        sql = f"{_BILLED} WHERE (? IS NULL OR account = ?) AND rowid > ? ORDER BY rowid"
        billed = await self._store.read(sql, (account, account, after))
        counted = await self._counted([row[0] for row in billed], first, last)
        accounts: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        for run, name, experiment, trial in billed:
            days = [{"day": day, **used} for day, used in sorted(counted[run].items())]
            view = {"id": run, "experiment": experiment, "trial": trial}
            view |= {"deleted": run not in self._store.runs, "total": total_of(days), "days": days}
            if view["deleted"] and not days:
                continue
            accounts[name].append(view)
        return [
            {"account": name, "total": total_of(run["total"] for run in runs), "runs": runs}
            for name, runs in sorted(accounts.items())
        ]

    async def _counted(
        self, runs: list[str], first: str, last: str
    ) -> defaultdict[str, dict[str, dict[str, Any]]]:
        """Return what runs have used, by run and day."""
        out: defaultdict[str, dict[str, dict[str, Any]]] = defaultdict(dict)

        def add(run: str, day: str, **numbers: float) -> None:
            if first <= day <= last:
                sums = out[run].setdefault(day, _nothing())
                for name, number in numbers.items():
                    sums[name] += number

        among, ids = "WHERE run IN (SELECT value FROM json_each(?))", json.dumps(runs)
        usage = f"SELECT run, day, {', '.join(_NAMES)} FROM usage {among} AND day BETWEEN ? AND ?"
        for run, day, *numbers in await self._store.read(usage, (ids, first, last)):
            add(run, day, **dict(zip(_NAMES, numbers, strict=True)))
        stays = (
            f"SELECT run, began_at, seconds, gpus FROM stays {among} "
            "AND date(began_at, 'unixepoch') <= ? AND date(began_at + seconds, 'unixepoch') >= ?"
        )
        for run, began_at, seconds, gpus in await self._store.read(stays, (ids, last, first)):
            for day, part in _by_day(began_at, seconds):
                add(run, day, place_seconds=part, gpu_seconds=part * gpus)
        return out


def _nothing() -> dict[str, Any]:
    return {**asdict(Usage()), "place_seconds": 0.0, "gpu_seconds": 0.0}


def total_of(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the sums of several views' numbers."""
    total = _nothing()
    for part in parts:
        for name in total:
            total[name] += part[name]
    return total


def _by_day(began_at: float, seconds: float) -> Iterable[tuple[str, float]]:
    """Yield the days of a stay with its seconds in each."""
    at, end = began_at, began_at + seconds
    while at < end:
        midnight = (at // _DAY + 1) * _DAY
        yield day_of(at), min(midnight, end) - at
        at = midnight
