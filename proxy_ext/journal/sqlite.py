"""The journal on SQLite: one file per rank on a local disk.

WAL with `synchronous=FULL`. One thread owns the connection; it commits everything that has queued
since its last commit in one transaction (group commit), so that concurrent calls share an fsync.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import orjson

from any_agent.errors import StoreBusy, StoreUnavailable
from any_agent.record import unpack_interaction
from any_agent.types import SessionState
from proxy_ext.journal import listing
from proxy_ext.journal.base import JournalStats
from proxy_ext.journal.listing import session_row
from proxy_ext.journal.prepare import prepare
from proxy_ext.journal.rows import (
    AnswerRow,
    NumberedRow,
    RequestMark,
    RewardRow,
    SessionFilter,
    SessionPage,
    SessionRow,
    StoredInteraction,
    StoredRequest,
)
from proxy_ext.journal.schema import connect
from proxy_ext.journal.statements import Statement

log = logging.getLogger(__name__)
T = TypeVar("T")

_MAX_BATCH = 512
_MAX_QUEUE = 16_384
_TRIMMED_PAGES = 1024
"""Given back to the file system at once: 4 MB, within some milliseconds."""


class _Job:
    """Something for the writer thread, and the future that learns how it ended."""

    __slots__ = ("future", "loop", "run", "writes")

    def __init__(self, run: Callable[[sqlite3.Connection], Any], *, writes: bool) -> None:
        self.run = run
        self.writes = writes
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()

    def settle(self, result: Any, error: Exception | None) -> None:
        def deliver() -> None:
            if self.future.cancelled():
                return
            if error is None:
                self.future.set_result(result)
            else:
                self.future.set_exception(error)

        try:
            self.loop.call_soon_threadsafe(deliver)
        except RuntimeError:
            log.debug("the event loop ended before a journal write was reported")


class SQLiteJournal:
    """See :class:`proxy_ext.journal.base.Journal`."""

    def __init__(self, path: Path) -> None:
        """Open or create the file; StoreUnavailable if it cannot be used."""
        self._path = path
        self._queue: queue.Queue[_Job | None] = queue.Queue(_MAX_QUEUE)
        self._closed = False
        self.stats = JournalStats()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = connect(path)
        except (OSError, sqlite3.Error) as error:
            raise StoreUnavailable(f"cannot open the journal {path}: {error}") from error
        self._thread = threading.Thread(target=self._work, name="journal", daemon=True)
        self._thread.start()

    async def commit(self, *statements: Statement) -> None:
        # Packing token data is the costly part: it happens here, not in the writer's transaction.
        prepared = [line for statement in statements for line in prepare(statement)]

        def write(connection: sqlite3.Connection) -> None:
            for sql, values in prepared:
                connection.execute(sql, values)

        await self._submit(write, writes=True)

    async def sessions(self, states: Iterable[SessionState]) -> list[SessionRow]:
        wanted = tuple(str(state) for state in states)
        marks = ", ".join("?" * len(wanted))
        sql = f"SELECT * FROM sessions WHERE state IN ({marks}) ORDER BY number"
        rows = await self._read(lambda c: c.execute(sql, wanted).fetchall())
        return [session_row(row) for row in rows]

    async def session(self, session_id: str) -> SessionRow | None:
        return await self._one("SELECT * FROM sessions WHERE id = ?", session_id)

    async def session_of_lane(self, lane: str) -> SessionRow | None:
        return await self._one(
            "SELECT * FROM sessions WHERE lane = ? ORDER BY number DESC LIMIT 1",
            lane,
        )

    async def group(self, group_id: str) -> list[SessionRow]:
        sql = "SELECT * FROM sessions WHERE group_id = ? ORDER BY number"
        rows = await self._read(lambda c: c.execute(sql, (group_id,)).fetchall())
        return [session_row(row) for row in rows]

    async def group_ids(self) -> list[str]:
        sql = "SELECT DISTINCT group_id FROM sessions WHERE group_id IS NOT NULL"
        return [row[0] for row in await self._read(lambda c: c.execute(sql).fetchall())]

    async def unfilled_groups(self, since: float) -> list[str]:
        sql = (
            "SELECT group_id FROM sessions WHERE group_id IS NOT NULL AND created_at >= ? "
            "GROUP BY group_id HAVING COUNT(*) < MAX(group_size)"
        )
        return [row[0] for row in await self._read(lambda c: c.execute(sql, (since,)).fetchall())]

    async def last_session(self, prefix: str) -> str | None:
        sql = "SELECT MAX(id) FROM sessions WHERE id >= ? AND id < ?"
        bounds = prefix, prefix + chr(0x10FFFF)
        last: str | None = (await self._read(lambda c: c.execute(sql, bounds).fetchone()))[0]
        return last

    async def last_number(self, prefix: str) -> int | None:
        at = len(prefix) + 1
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        sql = (
            "SELECT MAX(CAST(substr(id, ?) AS INTEGER)) FROM sessions WHERE id > ? AND id < ? "
            "AND substr(id, ?) NOT GLOB '*[^0-9]*'"
        )
        row = await self._read(lambda c: c.execute(sql, (at, prefix, end, at)).fetchone())
        number: int | None = row[0]
        return number

    async def counts(self) -> dict[tuple[str, SessionState], int]:
        sql = "SELECT mode, state, COUNT(*) FROM sessions GROUP BY state, mode"
        rows = await self._read(lambda c: c.execute(sql).fetchall())
        return {(mode, SessionState(state)): number for mode, state, number in rows}

    async def ended(
        self, *, before: float, oldest_step: int | None, limit: int
    ) -> list[NumberedRow]:
        return await self._read(
            lambda c: listing.ended(c, before=before, oldest_step=oldest_step, limit=limit)
        )

    async def page(self, wanted: SessionFilter, *, before: int | None, limit: int) -> SessionPage:
        return await self._read(lambda c: listing.page(c, wanted, before=before, limit=limit))

    async def number(self, session_id: str) -> int | None:
        sql = "SELECT number FROM sessions WHERE id = ?"
        row = await self._read(lambda c: c.execute(sql, (session_id,)).fetchone())
        return None if row is None else row[0]

    async def interactions(self, session_id: str) -> list[StoredInteraction]:
        sql = "SELECT data, reward, key FROM interactions WHERE session_id = ? ORDER BY number"
        rows = await self._read(lambda c: c.execute(sql, (session_id,)).fetchall())
        out = []
        for data, reward, key in rows:
            interaction = unpack_interaction(data)
            interaction.reward = reward
            out.append(StoredInteraction(interaction, key))
        return out

    async def requests(self, session_id: str) -> list[StoredRequest]:
        sql = (
            "SELECT id, request_hash, retry_count, delivered FROM interactions "
            "WHERE session_id = ? AND request_hash IS NOT NULL ORDER BY number"
        )
        rows = await self._read(lambda c: c.execute(sql, (session_id,)).fetchall())
        return [StoredRequest(id, RequestMark(hash, n), bool(d)) for id, hash, n, d in rows]

    async def rewards(self, session_id: str) -> list[RewardRow]:
        sql = (
            "SELECT interaction_id, name, value, by, at FROM rewards "
            "WHERE session_id = ? ORDER BY number"
        )
        rows = await self._read(lambda c: c.execute(sql, (session_id,)).fetchall())
        return [RewardRow(*row) for row in rows]

    async def answer(self, scope: str, key: str) -> AnswerRow | None:
        sql = (
            "SELECT scope, key, request_hash, status, body, created_at FROM answers "
            "WHERE scope = ? AND key = ?"
        )
        row = await self._read(lambda c: c.execute(sql, (scope, key)).fetchone())
        return None if row is None else AnswerRow(*row)

    async def meta(self, key: str) -> Any:
        sql = "SELECT value FROM meta WHERE key = ?"
        row = await self._read(lambda c: c.execute(sql, (key,)).fetchone())
        return None if row is None else orjson.loads(row[0])

    async def trim(self) -> None:
        def step(connection: sqlite3.Connection) -> None:
            (free,) = connection.execute("PRAGMA freelist_count").fetchone()
            for _ in range(min(free, _TRIMMED_PAGES)):
                # Whatever number it is given, sqlite3 steps such a statement once: one page.
                connection.execute("PRAGMA incremental_vacuum(1)")

        await self._submit(step, writes=True)

    def size(self) -> int:
        files = (self._path, self._path.with_name(f"{self._path.name}-wal"))
        return sum(file.stat().st_size for file in files if file.exists())

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await asyncio.to_thread(self._queue.put, None)
            await asyncio.to_thread(self._thread.join, 30)

    async def _one(self, sql: str, value: str) -> SessionRow | None:
        row = await self._read(lambda c: c.execute(sql, (value,)).fetchone())
        return None if row is None else session_row(row)

    async def _read(self, run: Callable[[sqlite3.Connection], T]) -> T:
        result: T = await self._submit(run, writes=False)
        return result

    async def _submit(self, run: Callable[[sqlite3.Connection], Any], *, writes: bool) -> Any:
        if self._closed:
            raise StoreBusy("the journal is closed", retry_after=2)
        job = _Job(run, writes=writes)
        try:
            self._queue.put_nowait(job)
        except queue.Full:
            raise StoreBusy("too many writes wait for the journal", retry_after=1) from None
        return await job.future

    def _work(self) -> None:
        while True:
            jobs = [self._queue.get()]
            while len(jobs) < _MAX_BATCH and jobs[-1] is not None:
                try:
                    jobs.append(self._queue.get_nowait())
                except queue.Empty:
                    break
            if todo := [job for job in jobs if job is not None]:
                self._run(todo)
            if jobs[-1] is None:
                self._connection.close()
                return

    def _run(self, jobs: list[_Job]) -> None:
        """One transaction for all; none of it is reported before the commit."""
        try:
            results = self._transact(jobs)
        except _BadJob as bad:
            # The others are not to suffer for it.
            self._fail([bad.job], bad.cause)
            rest = [job for job in jobs if job is not bad.job]
            if rest:
                self._run(rest)
        except Exception as cause:  # whatever it is, the callers must hear of it
            self._fail(jobs, cause)
        else:
            for job, result in zip(jobs, results, strict=True):
                job.settle(result, None)

    def _transact(self, jobs: list[_Job]) -> list[Any]:
        connection = self._connection
        writes = sum(job.writes for job in jobs)
        began = time.perf_counter()
        try:
            if writes:
                connection.execute("BEGIN IMMEDIATE")
            results = []
            for job in jobs:
                try:
                    results.append(job.run(connection))
                except Exception as cause:
                    raise _BadJob(job, cause) from cause
            if connection.in_transaction:
                connection.execute("COMMIT")
                self.stats.commit_seconds.observe(time.perf_counter() - began)
                self.stats.writes += writes
            return results
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
            raise

    def _fail(self, jobs: list[_Job], cause: Exception) -> None:
        log.error("journal write failed: %s", cause)
        error = StoreUnavailable(
            "the journal cannot be written; nothing was recorded, try again later", retry_after=5
        )
        for job in jobs:
            job.settle(None, error)


class _BadJob(Exception):
    """One job failed, not the transaction around it."""

    def __init__(self, job: _Job, cause: Exception) -> None:
        super().__init__(str(cause))
        self.job = job
        self.cause = cause
