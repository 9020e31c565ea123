"""The journal on SQLite: one file per rank on a local disk.

WAL with `synchronous=FULL`. The connection belongs to one thread, of `writer.py`.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import orjson

from any_agent.errors import SessionDamaged
from any_agent.record import unpack_interaction
from any_agent.types import SessionState
from proxy_ext.journal.base import JournalStats
from proxy_ext.journal.files import mark_damaged, open_journal
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
from proxy_ext.journal.sql import SESSION_FIELDS, prepare
from proxy_ext.journal.statements import EraseContent, MarkDelivered, Statement
from proxy_ext.journal.writer import JournalJob, JournalWriter, is_damage

log = logging.getLogger(__name__)
T = TypeVar("T")

_AT_ONCE = 32
"""Interactions that are unpacked before others have their turn."""


class SQLiteJournal:
    """See :class:`proxy_ext.journal.base.Journal`."""

    def __init__(self, path: Path) -> None:
        """Open or create the file; StartupError if it cannot be used."""
        self._path = path
        self.stats = JournalStats()
        connection, damage = open_journal(path)
        if damage is not None:
            self.stats.damaged = damage.sessions
        self._writer = JournalWriter(connection, path, self.stats)

    async def commit(self, *statements: Statement) -> None:
        # Packing token data is the costly part: it happens here, not in the writer's transaction.
        prepared = [line for statement in statements for line in prepare(statement)]

        def write(connection: sqlite3.Connection) -> None:
            for sql, values in prepared:
                connection.execute(sql, values)

        wipes = any(isinstance(statement, EraseContent) for statement in statements)
        lazy = all(isinstance(statement, MarkDelivered) for statement in statements)
        await self._writer.submit(JournalJob(write, writes=True, wipes=wipes, lazy=lazy))

    async def sessions(self, states: Iterable[SessionState]) -> list[SessionRow]:
        wanted = tuple(str(state) for state in states)
        marks = ", ".join("?" * len(wanted))
        sql = f"SELECT * FROM sessions WHERE state IN ({marks}) ORDER BY number"
        return await self._read(lambda c: [*map(session_row, c.execute(sql, wanted))])

    async def session(self, session_id: str) -> SessionRow | None:
        return await self._one("SELECT * FROM sessions WHERE id = ?", session_id)

    async def session_of_lane(self, lane: str) -> SessionRow | None:
        return await self._one(
            "SELECT * FROM sessions WHERE lane = ? ORDER BY number DESC LIMIT 1",
            lane,
        )

    async def group(self, group_id: str) -> list[SessionRow]:
        sql = "SELECT * FROM sessions WHERE group_id = ? ORDER BY number"
        return await self._read(lambda c: [*map(session_row, c.execute(sql, (group_id,)))])

    async def group_ids(self) -> list[str]:
        sql = "SELECT DISTINCT group_id FROM sessions WHERE group_id IS NOT NULL"
        return [row[0] for row in await self._read(lambda c: c.execute(sql).fetchall())]

    async def unfilled_groups(self, since: float, *, left: str) -> list[str]:
        sql = (
            "SELECT group_id FROM sessions WHERE group_id IS NOT NULL AND created_at >= ? "
            "GROUP BY group_id HAVING COUNT(*) - SUM(owner IS ?) < MAX(group_size)"
        )
        rows = await self._read(lambda c: c.execute(sql, (since, left)).fetchall())
        return [row[0] for row in rows]

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
            lambda c: ended(c, before=before, oldest_step=oldest_step, limit=limit)
        )

    async def page(self, wanted: SessionFilter, *, before: int | None, limit: int) -> SessionPage:
        return await self._read(lambda c: page(c, wanted, before=before, limit=limit))

    async def number(self, session_id: str) -> int | None:
        sql = "SELECT number FROM sessions WHERE id = ?"
        row = await self._read(lambda c: c.execute(sql, (session_id,)).fetchone())
        return None if row is None else row[0]

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
                if ended is not None and ended[0] not in (None, len(rows)):
                    what = f"{len(rows)} of {ended[0]} interactions are there"
                    raise self._damaged(session_id, what)
                return rows
            except sqlite3.DatabaseError as error:
                if is_damage(error):
                    mark_damaged(self._path)
                    raise self._damaged(session_id, str(error)) from error
                raise

        out = []
        for id, data, checksum, reward, key in await self._read(read):
            if zlib.crc32(data) != checksum:
                raise self._damaged(session_id, f"interaction {id} is not what was written")
            interaction = unpack_interaction(data)
            interaction.reward = reward
            out.append(StoredInteraction(interaction, key))
            if len(out) % _AT_ONCE == 0:
                # A long session takes tens of milliseconds: not in one go, for the streams' sake.
                await asyncio.sleep(0)
        return out

    def _damaged(self, session_id: str, what: str) -> SessionDamaged:
        log.error(
            "the journal %s is damaged: %s; session %s is ended, never trained on; check the disk",
            self._path,
            what,
            session_id,
        )
        return SessionDamaged(
            f"what is stored of session {session_id} is damaged; start a new session"
        )

    async def session_of_interaction(self, interaction_id: str) -> str | None:
        sql = "SELECT session_id FROM interactions WHERE id = ?"
        row = await self._read(lambda c: c.execute(sql, (interaction_id,)).fetchone())
        return None if row is None else row[0]

    async def requests(self, session_id: str) -> list[StoredRequest]:
        sql = (
            "SELECT id, request_hash, retry_count, delivered FROM interactions "
            "WHERE session_id = ? AND request_hash IS NOT NULL ORDER BY number"
        )
        rows = await self._read(lambda c: c.execute(sql, (session_id,)).fetchall())
        return [StoredRequest(id, RequestMark(hash, n), bool(d)) for id, hash, n, d in rows]

    async def rewards(self, session_id: str, *, last: int | None = None) -> list[RewardRow]:
        sql = (
            "SELECT interaction_id, name, value, by, at FROM rewards "
            "WHERE session_id = ? ORDER BY number DESC LIMIT ?"
        )
        values = (session_id, -1 if last is None else last)
        rows = await self._read(lambda c: c.execute(sql, values).fetchall())
        return [RewardRow(*row) for row in reversed(rows)]

    async def reward_parts(
        self, session_id: str, interaction_id: str | None
    ) -> tuple[dict[str | None, float], int]:
        # The other columns of a row with a MAX are those of the largest one.
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
        row = await self._read(lambda c: c.execute(sql, (scope, key)).fetchone())
        return None if row is None else AnswerRow(*row)

    async def meta(self, key: str) -> Any:
        sql = "SELECT value FROM meta WHERE key = ?"
        row = await self._read(lambda c: c.execute(sql, (key,)).fetchone())
        return None if row is None else orjson.loads(row[0])

    async def trim(self) -> int:
        free: int = await self._writer.submit(JournalJob(trim, writes=True))
        return free

    def size(self) -> int:
        files = (self._path, self._path.with_name(f"{self._path.name}-wal"))
        return sum(file.stat().st_size for file in files if file.exists())

    async def close(self) -> None:
        await self._writer.close()

    async def _one(self, sql: str, value: str) -> SessionRow | None:
        rows = await self._read(lambda c: [*map(session_row, c.execute(sql, (value,)))])
        return rows[0] if rows else None

    async def _read(self, run: Callable[[sqlite3.Connection], T]) -> T:
        result: T = await self._writer.submit(JournalJob(run, writes=False))
        return result


_LOOKED_AT = 20_000
"""Sessions that one page is looked for among."""
_TRIMMED = 1 << 20
"""Bytes that are given back to the file system at once, within some milliseconds."""
_NEVER_REPLAYED = (SessionState.EVALUATED, SessionState.EXPIRED, SessionState.ABORTED)
# 'export' is EXPORT_OWNER in proxy_ext/journal/rows.py, which imports the journal.
_ENDED = f"""
SELECT * FROM sessions INDEXED BY sessions_by_end
WHERE content = 'stored' AND ended_at < :before AND (
    state IN ({", ".join(f"'{state}'" for state in _NEVER_REPLAYED)})
    OR (state = 'rejected' AND step IS NULL)
    OR (state = 'trained' AND owner = 'export')
    OR (state IN ('trained', 'rejected') AND step <= :oldest_step)
) ORDER BY ended_at LIMIT :limit
"""
"""By their end: of what was archived, however much that is, nothing is looked at."""
_PAGE = """
SELECT *, (SELECT COUNT(*) FROM interactions WHERE session_id = sessions.id) AS interactions,
    (SELECT COUNT(*) FROM rewards WHERE session_id = sessions.id) AS rewards_given
FROM sessions WHERE number >= :lowest AND number < :before
"""


def session_row(row: sqlite3.Row) -> SessionRow:
    """A session as the table has it; an error of SQLite's own kind for one that was never written.

    No check of SQLite's finds that.
    """
    data = {name: row[name] for name in SESSION_FIELDS}
    try:
        data["state"] = SessionState(data["state"])
        data["metadata"] = orjson.loads(data["metadata"])
    except ValueError as error:
        damage = sqlite3.DatabaseError(f"session {data['id']} is not what was written: {error}")
        damage.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise damage from error
    return SessionRow(**data)


def ended(
    connection: sqlite3.Connection, *, before: float, oldest_step: int | None, limit: int
) -> list[NumberedRow]:
    """See :meth:`proxy_ext.journal.base.Journal.ended`."""
    values = {"before": before, "oldest_step": oldest_step, "limit": limit}
    rows = connection.execute(_ENDED, values).fetchall()
    found = [NumberedRow(row["number"], session_row(row)) for row in rows]
    return sorted(found, key=lambda each: each.number)


def page(
    connection: sqlite3.Connection, wanted: SessionFilter, *, before: int | None, limit: int
) -> SessionPage:
    """See :meth:`proxy_ext.journal.base.Journal.page`."""
    if before is None:
        (highest,) = connection.execute("SELECT MAX(number) FROM sessions").fetchone()
        before = (highest or 0) + 1
    lowest = max(1, before - _LOOKED_AT)
    values = {
        name: value
        for name in ("state", "task_id", "group_id", "tenant")
        if (value := getattr(wanted, name)) is not None
    }
    conditions = "".join(f" AND {name} = :{name}" for name in values)
    rows = connection.execute(
        f"{_PAGE}{conditions} ORDER BY number DESC LIMIT :limit",
        {**values, "lowest": lowest, "before": before, "limit": limit},
    ).fetchall()
    found = [
        NumberedRow(row["number"], session_row(row), row["interactions"], row["rewards_given"])
        for row in rows
    ]
    reached = found[-1].number if len(found) == limit else lowest
    return SessionPage(found, reached if reached > 1 else None)


def trim(connection: sqlite3.Connection) -> int:
    """See :meth:`proxy_ext.journal.base.Journal.trim`."""
    (free,) = connection.execute("PRAGMA freelist_count").fetchone()
    (size,) = connection.execute("PRAGMA page_size").fetchone()
    (can_give,) = connection.execute("PRAGMA auto_vacuum").fetchone()
    if not can_give:
        # It was of version 1: what is free in it is used again, but stays its own.
        return 0
    given = min(free, _TRIMMED // size)
    for _ in range(given):
        # Whatever number it is given, sqlite3 steps such a statement once: one page.
        connection.execute("PRAGMA incremental_vacuum(1)")
    return int((free - given) * size)
