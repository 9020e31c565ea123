"""The journal on SQLite: one file per rank on a local disk.

WAL with `synchronous=FULL`, or `OFF` with a log elsewhere, which has each commit. The connection
belongs to the thread of `writer.py`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import orjson

from any_agent.errors import SessionDamaged, StoreUnavailable
from any_agent.record import unpack_interaction
from any_agent.runtime import boot_clock
from any_agent.types import SessionState
from proxy_ext.journal.base import (
    EXPORT_OWNER,
    AnswerRow,
    EraseContent,
    JournalStats,
    MarkDelivered,
    NumberedRow,
    PutMeta,
    RequestMark,
    RewardRow,
    SessionFilter,
    SessionPage,
    SessionRow,
    Statement,
    StoredInteraction,
    StoredRequest,
)
from proxy_ext.journal.files import mark_damaged, open_file, open_reader, sync, was_now
from proxy_ext.journal.statements import (
    SESSION_FIELDS,
    Unsynced,
    lines_of,
    place_of,
    run_lines,
    set_place,
    unsynced_by,
)
from proxy_ext.journal.writer import CommitLog, JournalJob, JournalThread, is_damage

log = logging.getLogger(__name__)
T = TypeVar("T")

_UNPACK_BATCH = 32  # interactions that are unpacked before other tasks have their turn
MAX_SCANNED = 20_000  # sessions among which one page is searched
MAX_SUMMED = 2000  # the same for a choice by reward, which reads each session's calls
_TRIM_BYTES = 1 << 20  # given back to the file system at once, within some milliseconds
_MIN_FREE_BYTES = 1 << 20  # a full disk is written to again when it has this room
_NEVER_REPLAYED = (SessionState.EVALUATED, SessionState.EXPIRED, SessionState.ABORTED)
_ENDED = f"""
SELECT * FROM sessions INDEXED BY sessions_by_end
WHERE content = 'stored' AND ended_at < :before AND (
    state IN ({", ".join(f"'{state}'" for state in _NEVER_REPLAYED)})
    OR (state = 'rejected' AND step IS NULL)
    OR (state = 'trained' AND owner = '{EXPORT_OWNER}')
    OR (state IN ('trained', 'rejected') AND step <= :oldest_step)
) ORDER BY ended_at LIMIT :limit
"""
"""Selects ended sessions by the time of their end; archived ones cost nothing."""
_PAGE = """
SELECT *, (SELECT COUNT(*) FROM interactions WHERE session_id = sessions.id) AS interactions,
    (SELECT SUM(reward) FROM interactions WHERE session_id = sessions.id) AS interaction_reward,
    (SELECT COUNT(value) FROM rewards WHERE session_id = sessions.id) AS rewards_given
FROM sessions WHERE number >= :lowest AND number < :before
"""
_REWARD = """
(SELECT coalesce(sessions.final_reward + sum(reward), sessions.final_reward, sum(reward))
    FROM interactions WHERE session_id = sessions.id)
"""
"""The sum of a session's final reward and its calls' own; NULL without any."""
_CONDITIONS = {
    "min_reward": f"{_REWARD} >= :min_reward",
    "max_reward": f"{_REWARD} <= :max_reward",
    "reason": "instr(lower(reason), lower(:reason)) > 0",
    "created_after": "created_at >= :created_after",
    "created_before": "created_at < :created_before",
}
"""The conditions of a filter's fields that are not equal to a column."""


def session_row(row: sqlite3.Row) -> SessionRow:
    """Return a session as the table has it; sqlite3.DatabaseError if it is damaged.

    SQLite's own checks do not find such damage.
    """
    data = {name: row[name] for name in SESSION_FIELDS}
    try:
        data["state"] = SessionState(data["state"])
        data["metadata"] = orjson.loads(data["metadata"])
    except ValueError as error:
        damage = sqlite3.DatabaseError(f"the row of session {data['id']} is damaged: {error}")
        damage.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise damage from error
    return SessionRow(**data)


class Keeper(Protocol):
    """Keeps the log of commits that a journal has beside its file."""

    @property
    def log(self) -> CommitLog: ...

    def wipe(self) -> None:
        """Remove content that the file has no more from the log, soon."""

    def close(self) -> None: ...


class RestoredFile(NamedTuple):
    """A journal's file with every commit of its log."""

    connection: sqlite3.Connection
    keeper: Keeper
    claim: int
    unsynced: bool
    """It need not be synced: the log has what a crash of the machine takes from it."""


class _Written(asyncio.Future[None]):
    """The outcome of a write that reads may overtake.

    A caller that is cancelled learns it when the write is over: it still has its locks, and whoever
    reads next must see the outcome.
    """

    def cancel(self, msg: Any = None) -> bool:
        return False


class SQLiteJournal:
    """See :class:`proxy_ext.journal.base.Journal`."""

    def __init__(self, path: Path, restored: RestoredFile | None = None) -> None:
        """Open or create the file, unless it was restored; StartupError if it cannot be used."""
        self.path = path
        self.stats = JournalStats()
        if restored is None:
            connection, damage = open_file(path)
            if damage is not None:
                self.stats.damaged = damage.sessions
            self.keeper = None
            run, seq = place_of(connection)
            if run:
                if (mark := unsynced_by(connection)) is not None:
                    connection.close()
                    sync(path, mark)
                    connection, _ = open_file(path)
                    if not was_now(mark):
                        log.error(
                            "the journal %s was not synced when its machine stopped, and is used "
                            "without its log: commits may be missing",
                            path,
                        )
                # A log that it has elsewhere will miss what is written from here on.
                set_place(connection, run, seq + 1)
        else:
            connection, self.keeper, self.stats.claim, unsynced = restored
            connection.execute(f"PRAGMA synchronous = {'OFF' if unsynced else 'NORMAL'}")
        commit_log = None if self.keeper is None else self.keeper.log
        self.writer = self.reader = JournalThread(connection, path, self.stats, commit_log)
        if commit_log is not None:
            # Its reads do not wait for the log's server.
            self.reader = JournalThread(open_reader(path), path, self.stats, commit_log)

    async def commit(self, *statements: Statement) -> None:
        # The costly packing of tokens happens here, not in the writer's transaction.
        lines = [line for statement in statements for line in lines_of(statement)]

        def write(connection: sqlite3.Connection) -> None:
            run_lines(connection, lines)

        wipes = any(isinstance(statement, EraseContent) for statement in statements)
        lazy = all(isinstance(statement, MarkDelivered) for statement in statements)
        job = JournalJob(write, writes=True, wipes=wipes, lazy=lazy, lines=lines)
        if self.keeper is not None:
            job.future = _Written()
        try:
            await self.writer.submit(job)
        finally:
            if wipes and self.keeper is not None:
                self.keeper.wipe()

    async def sessions(self, states: Iterable[SessionState]) -> list[SessionRow]:
        wanted = [str(state) for state in states]
        marks = ", ".join("?" * len(wanted))
        sql = f"SELECT * FROM sessions WHERE state IN ({marks}) ORDER BY number"
        return await self._session_rows(sql, *wanted)

    async def session(self, session_id: str) -> SessionRow | None:
        rows = await self._session_rows("SELECT * FROM sessions WHERE id = ?", session_id)
        return rows[0] if rows else None

    async def session_of_lane(self, lane: str) -> SessionRow | None:
        sql = "SELECT * FROM sessions WHERE lane = ? ORDER BY number DESC LIMIT 1"
        rows = await self._session_rows(sql, lane)
        return rows[0] if rows else None

    async def group(self, group_id: str) -> list[SessionRow]:
        sql = "SELECT * FROM sessions WHERE group_id = ? ORDER BY number"
        return await self._session_rows(sql, group_id)

    async def group_ids(self) -> list[str]:
        sql = "SELECT DISTINCT group_id FROM sessions WHERE group_id IS NOT NULL"
        return [row[0] for row in await self._rows(sql)]

    async def unfilled_groups(self, since: float, *, left: str) -> list[str]:
        sql = (
            "SELECT group_id FROM sessions WHERE group_id IS NOT NULL AND created_at >= ? "
            "GROUP BY group_id HAVING COUNT(*) - SUM(owner IS ?) < MAX(group_size)"
        )
        return [row[0] for row in await self._rows(sql, since, left)]

    async def last_session(self, prefix: str) -> str | None:
        sql = "SELECT MAX(id) FROM sessions WHERE id >= ? AND id < ?"
        return await self._value(str, sql, prefix, prefix + chr(0x10FFFF))

    async def last_number(self, prefix: str) -> int | None:
        at = len(prefix) + 1
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        sql = (
            "SELECT MAX(CAST(substr(id, ?) AS INTEGER)) FROM sessions WHERE id > ? AND id < ? "
            "AND substr(id, ?) NOT GLOB '*[^0-9]*'"
        )
        return await self._value(int, sql, at, prefix, end, at)

    async def counts(self) -> dict[tuple[str, SessionState], int]:
        rows = await self._rows("SELECT mode, state, COUNT(*) FROM sessions GROUP BY state, mode")
        return {(mode, SessionState(state)): number for mode, state, number in rows}

    async def last_step(self) -> int | None:
        sql = "SELECT MAX(step) FROM sessions WHERE state IN ('trained', 'rejected')"
        return await self._value(int, sql)

    async def ended(
        self, *, before: float, oldest_step: int | None, limit: int
    ) -> list[NumberedRow]:
        values = {"before": before, "oldest_step": oldest_step, "limit": limit}

        def read(connection: sqlite3.Connection) -> list[NumberedRow]:
            rows = connection.execute(_ENDED, values).fetchall()
            found = [NumberedRow(row["number"], session_row(row)) for row in rows]
            return sorted(found, key=lambda each: each.number)

        return await self._read(read)

    async def page(self, wanted: SessionFilter, *, before: int | None, limit: int) -> SessionPage:
        values = {name: value for name, value in asdict(wanted).items() if value is not None}
        conditions = "".join(
            f" AND {_CONDITIONS.get(name, f'{name} = :{name}')}" for name in values
        )
        sql = f"{_PAGE}{conditions} ORDER BY number DESC LIMIT :limit"
        by_reward = not values.keys().isdisjoint(("min_reward", "max_reward"))

        def read(connection: sqlite3.Connection) -> SessionPage:
            end = before
            if end is None:
                (highest,) = connection.execute("SELECT MAX(number) FROM sessions").fetchone()
                end = (highest or 0) + 1
            lowest = max(1, end - (MAX_SUMMED if by_reward else MAX_SCANNED))
            bounds = {"lowest": lowest, "before": end, "limit": limit}
            rows = [
                NumberedRow(
                    row["number"],
                    session_row(row),
                    row["interactions"],
                    row["rewards_given"],
                    row["interaction_reward"],
                )
                for row in connection.execute(sql, {**values, **bounds})
            ]
            reached = rows[-1].number if len(rows) == limit else lowest
            return SessionPage(rows, reached if reached > 1 else None)

        return await self._read(read)

    async def number(self, session_id: str) -> int | None:
        return await self._value(int, "SELECT number FROM sessions WHERE id = ?", session_id)

    async def interactions(self, session_id: str) -> list[StoredInteraction]:
        sql = (
            "SELECT id, data, checksum, reward, key FROM interactions WHERE session_id = ? "
            "ORDER BY number"
        )
        sealed = "SELECT recorded FROM sessions WHERE id = ? AND content = 'stored'"

        def read(connection: sqlite3.Connection) -> list[sqlite3.Row]:
            try:
                rows = connection.execute(sql, (session_id,)).fetchall()
                ended = connection.execute(sealed, (session_id,)).fetchone()
            except sqlite3.DatabaseError as error:
                if is_damage(error):
                    mark_damaged(self.path)
                    raise self._damaged(session_id, str(error)) from error
                raise
            if ended is not None and ended[0] not in (None, len(rows)):
                problem = f"{len(rows)} of {ended[0]} interactions are there"
                raise self._damaged(session_id, problem)
            return rows

        out = []
        for id, data, checksum, reward, key in await self._read(read):
            if zlib.crc32(data) != checksum:
                raise self._damaged(session_id, f"interaction {id} does not match its checksum")
            interaction = unpack_interaction(data)
            interaction.reward = reward
            out.append(StoredInteraction(interaction, key))
            if len(out) % _UNPACK_BATCH == 0:
                # A long session takes tens of milliseconds; streams continue in between.
                await asyncio.sleep(0)
        return out

    def _damaged(self, session_id: str, problem: str) -> SessionDamaged:
        log.error(
            "the journal %s is damaged: %s; session %s is ended, never trained on; check the disk",
            self.path,
            problem,
            session_id,
        )
        return SessionDamaged(f"the record of session {session_id} is damaged; start a new session")

    async def session_of_interaction(self, interaction_id: str) -> str | None:
        sql = "SELECT session_id FROM interactions WHERE id = ?"
        return await self._value(str, sql, interaction_id)

    async def requests(self, session_id: str) -> list[StoredRequest]:
        sql = (
            "SELECT id, request_hash, retry_count, delivered FROM interactions "
            "WHERE session_id = ? AND request_hash IS NOT NULL ORDER BY number"
        )
        rows = await self._rows(sql, session_id)
        return [StoredRequest(id, RequestMark(hash, n), bool(d)) for id, hash, n, d in rows]

    async def rewards(self, session_id: str, *, last: int | None = None) -> list[RewardRow]:
        sql = (
            "SELECT interaction_id, name, value, by, at, text FROM rewards "
            "WHERE session_id = ? ORDER BY number DESC LIMIT ?"
        )
        rows = await self._rows(sql, session_id, -1 if last is None else last)
        return [RewardRow(*row) for row in reversed(rows)]

    async def reward_parts(
        self, session_id: str, interaction_id: str | None
    ) -> tuple[dict[str | None, float], int]:
        # SQLite takes the other columns from the row that has the MAX.
        parts = (
            "SELECT name, value, MAX(number) FROM rewards "
            "WHERE session_id = ? AND interaction_id IS ? AND value IS NOT NULL GROUP BY name"
        )
        count = "SELECT COUNT(value) FROM rewards WHERE session_id = ?"

        def read(connection: sqlite3.Connection) -> tuple[dict[str | None, float], int]:
            rows = connection.execute(parts, (session_id, interaction_id)).fetchall()
            (given,) = connection.execute(count, (session_id,)).fetchone()
            return {name: value for name, value, _ in rows}, given

        return await self._read(read)

    async def answer(self, scope: str, key: str) -> AnswerRow | None:
        sql = (
            "SELECT scope, key, request_hash, status, body, created_at FROM answers "
            "WHERE scope = ? AND key = ?"
        )
        rows = await self._rows(sql, scope, key)
        return AnswerRow(*rows[0]) if rows else None

    async def meta(self, key: str) -> Any:
        value = await self._value(bytes, "SELECT value FROM meta WHERE key = ?", key)
        return None if value is None else orjson.loads(value)

    async def trim(self) -> int:
        free: int = await self.writer.submit(JournalJob(_trim, writes=True))
        return free

    async def retry_full(self) -> None:
        if not self.stats.full:
            return
        disk = await asyncio.to_thread(os.statvfs, self.path.parent)
        if disk.f_bavail * disk.f_frsize >= _MIN_FREE_BYTES:
            with suppress(StoreUnavailable):
                await self.commit(PutMeta("room", time.time()))

    def size(self) -> int:
        files = (self.path, self.path.with_name(f"{self.path.name}-wal"))
        return sum(file.stat().st_size for file in files if file.exists())

    async def close(self) -> None:
        await self.reader.close()
        await self.writer.close()
        if self.keeper is not None:
            mark = Unsynced(boot_clock.boot_id(), self.stats.claim)
            with suppress(sqlite3.Error, OSError):  # then it is made again after another boot
                await asyncio.to_thread(sync, self.path, mark)
            await asyncio.to_thread(self.keeper.close)

    async def _session_rows(self, sql: str, *values: Any) -> list[SessionRow]:
        return await self._read(lambda c: [*map(session_row, c.execute(sql, values))])

    async def _rows(self, sql: str, *values: Any) -> list[sqlite3.Row]:
        return await self._read(lambda c: c.execute(sql, values).fetchall())

    async def _value(self, _: type[T], sql: str, *values: Any) -> T | None:
        """Return the first column of the first row, of this type; None without a row."""
        rows = await self._rows(sql, *values)
        return rows[0][0] if rows else None

    async def _read(self, run: Callable[[sqlite3.Connection], T]) -> T:
        result: T = await self.reader.submit(JournalJob(run, writes=False))
        return result


def _trim(connection: sqlite3.Connection) -> int:
    (free,) = connection.execute("PRAGMA freelist_count").fetchone()
    (size,) = connection.execute("PRAGMA page_size").fetchone()
    given = min(free, _TRIM_BYTES // size)
    for _ in range(given):
        # sqlite3 steps such a statement once, which frees one page, whatever its argument.
        connection.execute("PRAGMA incremental_vacuum(1)")
    (left,) = connection.execute("PRAGMA freelist_count").fetchone()
    # A file that cannot give pages back keeps them.
    return int(left * size) if left < free else 0
