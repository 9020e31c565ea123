"""The journal on SQLite: one file per rank on a local disk.

WAL with `synchronous=FULL`. The connection belongs to the thread of `writer.py`.
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
from typing import Any, TypeAlias, TypeVar

import orjson

from any_agent.errors import SessionDamaged, StoreUnavailable
from any_agent.record import pack_interaction, unpack_interaction
from any_agent.types import SessionState
from proxy_ext.journal.base import (
    EXPORT_OWNER,
    AnswerRow,
    ArchiveContent,
    DropAnswers,
    EraseContent,
    JournalStats,
    MarkDelivered,
    NumberedRow,
    PutAnswer,
    PutInteraction,
    PutMeta,
    PutSession,
    RequestMark,
    RewardRow,
    SessionFilter,
    SessionPage,
    SessionRow,
    SetAwaiting,
    SetReward,
    SetState,
    Statement,
    StoredInteraction,
    StoredRequest,
)
from proxy_ext.journal.files import mark_damaged, open_file
from proxy_ext.journal.writer import JournalJob, JournalWriter, is_damage

log = logging.getLogger(__name__)
T = TypeVar("T")

_Prepared: TypeAlias = tuple[tuple[str, tuple[Any, ...]], ...]
"""SQL with its values, in the order of their execution."""

_SESSION_FIELDS = tuple(SessionRow.__dataclass_fields__)
_PUT_SESSION = (
    f"INSERT INTO sessions ({', '.join(_SESSION_FIELDS)}) "
    f"VALUES ({', '.join('?' * len(_SESSION_FIELDS))})"
)
_SEAL = (
    "recorded = COALESCE(recorded, "
    "(SELECT COUNT(*) FROM interactions WHERE session_id = sessions.id))"
)
_AMONG = "IN (SELECT value FROM json_each(?))"
_PUT_INTERACTION = """
INSERT INTO interactions
    (id, session_id, data, checksum, reward, key, request_hash, retry_count)
VALUES (?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET
    data = excluded.data, checksum = excluded.checksum, reward = excluded.reward,
    key = COALESCE(excluded.key, key),
    request_hash = COALESCE(excluded.request_hash, request_hash),
    retry_count = COALESCE(excluded.retry_count, retry_count)
"""
_UNPACK_BATCH = 32  # interactions that are unpacked before other tasks have their turn
_MAX_SCANNED = 20_000  # sessions among which one page is searched
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
    (SELECT COUNT(*) FROM rewards WHERE session_id = sessions.id) AS rewards_given
FROM sessions WHERE number >= :lowest AND number < :before
"""


def _prepare(statement: Statement) -> _Prepared:
    s = statement
    match s:
        case PutSession(row):
            fields = {name: getattr(row, name) for name in _SESSION_FIELDS}
            fields |= {"metadata": orjson.dumps(row.metadata), "state": str(row.state)}
            return ((_PUT_SESSION, tuple(fields.values())),)
        case SetState():
            sql = (
                "UPDATE sessions SET state = ?, reason = ?, owner = ?, step = ?, ended_at = ?, "
                f"awaits_until = NULL, {_SEAL} WHERE id {_AMONG}"
            )
            return ((sql, (str(s.state), s.reason, s.owner, s.step, s.at, _ids(s.session_ids))),)
        case SetAwaiting(session_id, until):
            sql = (
                f"UPDATE sessions SET state = 'awaiting_reward', awaits_until = ?, {_SEAL} "
                "WHERE id = ?"
            )
            return ((sql, (until, session_id)),)
        case PutInteraction(i, key, mark):
            data = pack_interaction(i)
            request = (None, None) if mark is None else (mark.hash, mark.retry_count)
            values = (i.id, i.session_id, data, zlib.crc32(data), i.reward, key, *request)
            return ((_PUT_INTERACTION, values),)
        case SetReward():
            history = (
                "INSERT INTO rewards (session_id, interaction_id, name, value, by, at) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (s.session_id, s.interaction_id, s.name, s.value, s.by, s.at),
            )
            if s.interaction_id is None:
                sql = "UPDATE sessions SET final_reward = ? WHERE id = ?"
            else:
                sql = "UPDATE interactions SET reward = ? WHERE id = ?"
            return (history, (sql, (s.combined, s.interaction_id or s.session_id)))
        case MarkDelivered(ids):
            return ((f"UPDATE interactions SET delivered = 1 WHERE id {_AMONG}", (_ids(ids),)),)
        case PutAnswer():
            sql = (
                "INSERT INTO answers (scope, key, request_hash, status, body, created_at) "
                "VALUES (?, ?, ?, ?, ?, ?)"
            )
            return ((sql, (s.scope, s.key, s.request_hash, s.status, s.body, s.created_at)),)
        case DropAnswers(before):
            return (("DELETE FROM answers WHERE created_at < ?", (before,)),)
        case EraseContent(ids):
            return _drop_content(ids, "deleted")
        case ArchiveContent(ids):
            rewards = (f"DELETE FROM rewards WHERE session_id {_AMONG}", (_ids(ids),))
            return (rewards, *_drop_content(ids, "archived"))
        case PutMeta(key, value):
            sql = "INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)"
            return ((sql, (key, orjson.dumps(value))),)


def _drop_content(session_ids: Iterable[str], content: str) -> _Prepared:
    ids = _ids(session_ids)
    rows = f"UPDATE sessions SET content = ?, metadata = ? WHERE id {_AMONG}"
    return (
        (f"DELETE FROM interactions WHERE session_id {_AMONG}", (ids,)),
        (rows, (content, b"{}", ids)),
    )


def _ids(ids: Iterable[str]) -> str:
    return orjson.dumps(list(ids)).decode()


def session_row(row: sqlite3.Row) -> SessionRow:
    """Return a session as the table has it; sqlite3.DatabaseError if it is damaged.

    SQLite's own checks do not find such damage.
    """
    data = {name: row[name] for name in _SESSION_FIELDS}
    try:
        data["state"] = SessionState(data["state"])
        data["metadata"] = orjson.loads(data["metadata"])
    except ValueError as error:
        damage = sqlite3.DatabaseError(f"the row of session {data['id']} is damaged: {error}")
        damage.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise damage from error
    return SessionRow(**data)


class SQLiteJournal:
    """See :class:`proxy_ext.journal.base.Journal`."""

    def __init__(self, path: Path) -> None:
        """Open or create the file; StartupError if it cannot be used."""
        self._path = path
        self.stats = JournalStats()
        connection, damage = open_file(path)
        if damage is not None:
            self.stats.damaged = damage.sessions
        self._writer = JournalWriter(connection, path, self.stats)

    async def commit(self, *statements: Statement) -> None:
        # The costly packing of tokens happens here, not in the writer's transaction.
        prepared = [line for statement in statements for line in _prepare(statement)]

        def write(connection: sqlite3.Connection) -> None:
            for sql, values in prepared:
                connection.execute(sql, values)

        wipes = any(isinstance(statement, EraseContent) for statement in statements)
        lazy = all(isinstance(statement, MarkDelivered) for statement in statements)
        await self._writer.submit(JournalJob(write, writes=True, wipes=wipes, lazy=lazy))

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
        conditions = "".join(f" AND {name} = :{name}" for name in values)
        sql = f"{_PAGE}{conditions} ORDER BY number DESC LIMIT :limit"

        def read(connection: sqlite3.Connection) -> SessionPage:
            end = before
            if end is None:
                (highest,) = connection.execute("SELECT MAX(number) FROM sessions").fetchone()
                end = (highest or 0) + 1
            lowest = max(1, end - _MAX_SCANNED)
            bounds = {"lowest": lowest, "before": end, "limit": limit}
            rows = [
                NumberedRow(
                    row["number"], session_row(row), row["interactions"], row["rewards_given"]
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
                    mark_damaged(self._path)
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
            self._path,
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
            "SELECT interaction_id, name, value, by, at FROM rewards "
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
            "WHERE session_id = ? AND interaction_id IS ? GROUP BY name"
        )
        count = "SELECT COUNT(*) FROM rewards WHERE session_id = ?"

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
        free: int = await self._writer.submit(JournalJob(_trim, writes=True))
        return free

    async def retry_full(self) -> None:
        if not self.stats.full:
            return
        disk = await asyncio.to_thread(os.statvfs, self._path.parent)
        if disk.f_bavail * disk.f_frsize >= _MIN_FREE_BYTES:
            with suppress(StoreUnavailable):
                await self.commit(PutMeta("room", time.time()))

    def size(self) -> int:
        files = (self._path, self._path.with_name(f"{self._path.name}-wal"))
        return sum(file.stat().st_size for file in files if file.exists())

    async def close(self) -> None:
        await self._writer.close()

    async def _session_rows(self, sql: str, *values: Any) -> list[SessionRow]:
        return await self._read(lambda c: [*map(session_row, c.execute(sql, values))])

    async def _rows(self, sql: str, *values: Any) -> list[sqlite3.Row]:
        return await self._read(lambda c: c.execute(sql, values).fetchall())

    async def _value(self, _: type[T], sql: str, *values: Any) -> T | None:
        """Return the first column of the first row, of this type; None without a row."""
        rows = await self._rows(sql, *values)
        return rows[0][0] if rows else None

    async def _read(self, run: Callable[[sqlite3.Connection], T]) -> T:
        result: T = await self._writer.submit(JournalJob(run, writes=False))
        return result


def _trim(connection: sqlite3.Connection) -> int:
    (free,) = connection.execute("PRAGMA freelist_count").fetchone()
    (size,) = connection.execute("PRAGMA page_size").fetchone()
    (can_give,) = connection.execute("PRAGMA auto_vacuum").fetchone()
    if not can_give:
        # A file of version 1 reuses its free pages, but cannot give them back.
        return 0
    given = min(free, _TRIM_BYTES // size)
    for _ in range(given):
        # sqlite3 steps such a statement once, which frees one page, whatever its argument.
        connection.execute("PRAGMA incremental_vacuum(1)")
    return int((free - given) * size)
