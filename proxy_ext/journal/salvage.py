"""The salvage of a damaged journal: its readable rows become a new file, the original is set aside.

Whatever table, page or index is damaged, each row is looked up by its number, and the numbers come
from the table and from each of its indexes, read from both ends. The indexes also give the session
of an unreadable row: that session is ended and its content removed, so that nothing is ever trained
on half of a session.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from any_agent.errors import StartupError
from any_agent.runtime.atomic_files import create_empty, fsync, make_folder
from any_agent.types import TERMINAL_STATES, SessionState
from proxy_ext.journal import schema

_CHILDREN = ("interactions", "rewards")  # tables whose rows belong to sessions
_END = """
UPDATE sessions SET
    state = CASE WHEN state IN ('open', 'awaiting_reward') THEN 'aborted'
            WHEN state IN ('finalized', 'leased') THEN 'rejected' ELSE state END,
    content = CASE WHEN content = 'archived'
        AND NOT EXISTS (SELECT 1 FROM interactions WHERE session_id = sessions.id)
        THEN content ELSE 'deleted' END,
    ended_at = COALESCE(ended_at, ?), reason = 'damaged', owner = NULL
WHERE id IN (SELECT id FROM damaged)
"""
_LIKE_ITS_GROUP = """
UPDATE sessions SET group_size = (
    SELECT MAX(group_size) FROM sessions AS other WHERE other.group_id = sessions.group_id
) WHERE id = ? AND group_id IS NOT NULL
"""
_OPEN = "state IN ('open', 'awaiting_reward')"
_LIVE = "state IN ('open', 'awaiting_reward', 'finalized', 'leased')"
_INCOMPLETE = """
recorded <> (SELECT COUNT(*) FROM interactions WHERE session_id = sessions.id)
AND content = 'stored'
"""


@dataclass(slots=True)
class Damage:
    """The damage of a journal."""

    quarantine: Path
    """The folder with the damaged files."""
    rows: dict[str, int] = field(default_factory=dict)
    """Number of unreadable rows by table."""
    sessions: int = 0
    """Number of sessions ended for it."""


@dataclass(slots=True)
class _Table:
    """A table of a damaged journal."""

    source: sqlite3.Connection
    name: str
    columns: list[str]
    indexes: list[tuple[str, list[str]]]
    """Names and columns of indexes over all rows."""
    known: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The columns that the indexes have of each row, by its number."""
    complete: bool = False
    """All rows are known."""

    def find_rows(self) -> None:
        listings: list[tuple[str, list[str]]] = [("NOT INDEXED", [])]
        listings += [(f'INDEXED BY "{name}"', columns) for name, columns in self.indexes]
        for how, columns in listings:
            order = columns or ["rowid"]
            read_fully = []
            for way in ("ASC", "DESC"):
                by = ", ".join(f"{column} {way}" for column in order)
                selected = ", ".join(["rowid", *columns])
                sql = f"SELECT {selected} FROM {self.name} {how} ORDER BY {by}"
                read_fully.append(self._read_listing(sql, columns))
            self.complete = self.complete or any(read_fully)

    def _read_listing(self, sql: str, columns: list[str]) -> bool:
        """Read a listing as far as possible, and return True if it was read to its end."""
        try:
            for number, *values in self.source.execute(sql):
                row = self.known.setdefault(number, {})
                row.update(zip(columns, values, strict=True))
        except (sqlite3.DatabaseError, UnicodeDecodeError):
            return False
        return True

    def rows(self) -> Iterator[tuple[int, tuple[Any, ...] | None]]:
        """Iterate over all numbers with their rows' values; None where a row is unreadable."""
        sql = f"SELECT {', '.join(self.columns)} FROM {self.name} NOT INDEXED WHERE rowid = ?"
        for number in sorted(self.known):
            row = None
            with contextlib.suppress(sqlite3.DatabaseError, UnicodeDecodeError):
                row = self.source.execute(sql, (number,)).fetchone()
            yield number, row if row is None or self._sound(row) else None

    def _sound(self, row: tuple[Any, ...]) -> bool:
        values = dict(zip(self.columns, row, strict=True))
        if self.name == "sessions":
            return _is_json(values["metadata"]) and values["state"] in list(SessionState)
        if self.name != "interactions":
            return True
        data = values["data"]
        return isinstance(data, bytes) and bool(zlib.crc32(data) == values.get("checksum"))

    def session_of(self, number: int) -> str | None:
        """Return the session of a row, if the indexes or the rest of the row have it."""
        session_id = self.known[number].get("session_id")
        if session_id is None:
            sql = f"SELECT session_id FROM {self.name} NOT INDEXED WHERE rowid = ?"
            with contextlib.suppress(sqlite3.DatabaseError, UnicodeDecodeError, TypeError):
                (session_id,) = self.source.execute(sql, (number,)).fetchone()
        return session_id if isinstance(session_id, str) else None


def _is_json(value: Any) -> bool:
    try:
        orjson.loads(value)
    except ValueError:
        return False
    return True


def salvage(source: sqlite3.Connection, path: Path, *, commits_lost: bool) -> Damage:
    """Replace a damaged journal by a new one, and close ``source``, the damaged one's connection.

    ``commits_lost``: the newest state of unknown rows is missing.

    Raises:
        StartupError: nothing of it can be read.
        OSError, sqlite3.Error: the new file cannot be written; the damaged one is as it was.
    """
    new = path.with_name(f".salvaging-{path.name}")
    new.unlink(missing_ok=True)
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    damage = Damage(path.parent / "quarantine" / f"{path.name}-{stamp}")
    try:
        tables, indexes, version = _schema(source)
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        raise unusable(path, error) from error
    create_empty(new)
    target = sqlite3.connect(new, isolation_level=None)
    try:
        schema.set_file_format(target)
        target.execute("BEGIN")
        for sql in (*tables.values(), *indexes):
            target.execute(sql)
        lost = _LostRows(commits=commits_lost)
        _copy(source, target, list(tables), damage, lost)
        damage.sessions = _end(target, lost)
        target.execute(f"PRAGMA user_version = {version}")
        target.execute("COMMIT")
    except BaseException:
        target.close()
        new.unlink()
        raise
    target.close()
    fsync(new)
    new.rename(_salvaged(path))
    # Before the damaged file moves: at every moment one of the two exists.
    fsync(path.parent)
    _set_aside(path, damage.quarantine)
    # The file was moved, so that closing the connection does not write the log into it.
    source.close()
    finish(path)
    return damage


def finish(path: Path) -> None:
    """Move a salvaged journal to its place, if there is one, also after a kill meanwhile."""
    salvaged = _salvaged(path)
    if not salvaged.exists():
        return
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    _set_aside(path, path.parent / "quarantine" / f"{path.name}-{stamp}")
    salvaged.rename(path)
    fsync(path.parent)


def unusable(path: Path, error: object) -> StartupError:
    """Return the error of a journal of which nothing can be saved."""
    return StartupError(
        f"the journal {path} is damaged and nothing of it can be read ({error}): replace it by a "
        "backup, or move it away and start again without its sessions"
    )


def _salvaged(path: Path) -> Path:
    return path.with_name(f".salvaged-{path.name}")


def _set_aside(path: Path, quarantine: Path) -> None:
    """Move the damaged files; the log first, as it is never read without its file."""
    damaged = [path.with_name(path.name + end) for end in ("-wal", "-shm", "")]
    if not any(file.exists() for file in damaged):
        return
    make_folder(quarantine)
    for file in damaged:
        if file.exists():
            file.rename(quarantine / file.name)
    for folder in (quarantine, quarantine.parent, path.parent):
        fsync(folder)


def _schema(source: sqlite3.Connection) -> tuple[dict[str, str], list[str], int]:
    """Return the SQL of the tables by name, the SQL of the indexes, and the version."""
    sql = "SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL"
    items = source.execute(sql).fetchall()
    tables = {name: text for kind, name, text in items if kind == "table"}
    if "sessions" not in tables or "interactions" not in tables:
        raise sqlite3.DatabaseError("its tables are missing")
    (version,) = source.execute("PRAGMA user_version").fetchone()
    return tables, [text for kind, _, text in items if kind == "index"], version


def _table(source: sqlite3.Connection, name: str) -> _Table:
    columns = [row[1] for row in source.execute(f"PRAGMA table_info({name})")]
    indexes = []
    for _, index, _, _, partial in source.execute(f"PRAGMA index_list({name})").fetchall():
        if not partial:
            info = source.execute(f'PRAGMA index_info("{index}")').fetchall()
            indexes.append((index, [row[2] for row in info]))
    return _Table(source, name, columns, indexes)


@dataclass(slots=True)
class _LostRows:
    """The sessions with lost data."""

    content: set[str] = field(default_factory=set)
    history: set[str] = field(default_factory=set)
    """Sessions that lost single rewards, but not the combined ones."""
    perhaps: bool = False
    """Other sessions may have lost their newest rows as well."""
    commits: bool = False
    """The newest state of unknown sessions is lost."""


def _copy(
    source: sqlite3.Connection,
    target: sqlite3.Connection,
    names: list[str],
    damage: Damage,
    lost: _LostRows,
) -> None:
    for name in names:
        table = _table(source, name)
        table.find_rows()
        numbers = _copy_rows(table, target)
        if numbers:
            damage.rows[name] = len(numbers)
        if name == "sessions":
            lost.content |= _insert_tombstones(table, target, numbers)
        elif name in _CHILDREN:
            owners = {table.session_of(number) for number in numbers}
            ids = {owner for owner in owners if owner is not None}
            lost.perhaps = lost.perhaps or len(ids) < len(owners) or not table.complete
            if name == "interactions":
                lost.content |= ids
            else:
                lost.history |= ids


def _copy_rows(table: _Table, target: sqlite3.Connection) -> list[int]:
    """Copy the readable rows, and return the numbers of the others."""
    # A column `number` is the rowid.
    names = table.columns if "number" in table.columns else ["rowid", *table.columns]
    sql = f"INSERT INTO {table.name} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
    lost = []
    for number, row in table.rows():
        try:
            if row is None:
                raise sqlite3.IntegrityError("it cannot be read")
            target.execute(sql, row if len(row) == len(names) else (number, *row))
        except sqlite3.IntegrityError:
            # A row that breaks a constraint is damaged as well.
            lost.append(number)
    return lost


def _insert_tombstones(table: _Table, target: sqlite3.Connection, lost: list[int]) -> set[str]:
    """Insert a row for each session whose row is lost, so that its id stays known."""
    inserted = set()
    for number in lost:
        known = table.known[number]
        values = {
            "rowid": number,
            "id": known.get("id"),
            "lane": known.get("lane") or "",
            "mode": known.get("mode") or "train",
            "state": known.get("state") or "open",
            "group_id": known.get("group_id"),
            "group_size": 1,
            "metadata": b"{}",
            # The latest possible opening gives its group the most time.
            "created_at": time.time(),
            "expires_at": time.time(),
        }
        if values["state"] in TERMINAL_STATES:
            # Its content may be in an archive; if it is not, an export reports that.
            values["content"] = "archived"
        marks = ", ".join(f":{name}" for name in values)
        with contextlib.suppress(sqlite3.IntegrityError):
            target.execute(f"INSERT INTO sessions ({', '.join(values)}) VALUES ({marks})", values)
            inserted.add(str(known["id"]))
    target.executemany(_LIKE_ITS_GROUP, [(id,) for id in inserted])
    return inserted


def _end(target: sqlite3.Connection, lost: _LostRows) -> int:
    """End the sessions with lost data, and remove the rest of their content."""
    target.execute("CREATE TEMP TABLE damaged (id TEXT PRIMARY KEY)")
    add = "INSERT OR IGNORE INTO damaged "
    target.executemany(f"{add} VALUES (?)", [(id,) for id in lost.content])
    target.executemany(
        f"{add} SELECT id FROM sessions WHERE id = ? AND {_OPEN}", [(id,) for id in lost.history]
    )
    target.execute(f"{add} SELECT id FROM sessions WHERE {_INCOMPLETE}")
    if lost.commits:
        target.execute(f"{add} SELECT id FROM sessions WHERE {_LIVE}")
    elif lost.perhaps:
        target.execute(f"{add} SELECT id FROM sessions WHERE {_OPEN}")
    ended = target.execute(_END, (time.time(),)).rowcount
    among = "session_id IN (SELECT id FROM damaged)"
    target.execute(f"DELETE FROM interactions WHERE {among}")
    if "text" in {row[1] for row in target.execute("PRAGMA table_info(rewards)")}:
        target.execute(f"DELETE FROM rewards WHERE value IS NULL AND {among}")
        target.execute(f"UPDATE rewards SET text = NULL WHERE {among}")
    return ended
