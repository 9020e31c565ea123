"""Reads over many sessions, each bounded: they run in the thread that writes."""

from __future__ import annotations

import sqlite3

import orjson

from any_agent.types import SessionState
from proxy_ext.journal.rows import NumberedRow, SessionFilter, SessionPage, SessionRow
from proxy_ext.journal.sql import SESSION_FIELDS

_LOOKED_AT = 20_000
"""Sessions that one page is looked for among."""
_TRIMMED = 1 << 20
"""Bytes that are given back to the file system at once, within some milliseconds."""
_NEVER_REPLAYED = (SessionState.EVALUATED, SessionState.EXPIRED, SessionState.ABORTED)
# 'export' is EXPORT_OWNER in proxy_ext/sessions/lease_owners.py, which imports the journal.
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
