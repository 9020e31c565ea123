"""A damaged journal: what can be read of it becomes a new file, the original is set aside.

Whatever table, page and index are damaged, each row is looked for by its number, and the numbers
come from the table and from each of its indexes, from both ends. The indexes also tell which
session a row that cannot be read belonged to: such a session is ended and its content is removed,
so that nothing is ever trained on half of it.
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
from any_agent.record import unpack_interaction
from any_agent.runtime.atomic_files import fsync
from any_agent.types import TERMINAL_STATES, SessionState
from proxy_ext.journal import schema

_CHILDREN = ("interactions", "rewards")
"""Tables whose rows belong to sessions."""
_END = """
UPDATE sessions SET
    state = CASE WHEN state IN ('open', 'awaiting_reward') THEN 'aborted'
            WHEN state IN ('finalized', 'leased') THEN 'rejected' ELSE state END,
    {also} reason = 'damaged', owner = NULL
WHERE id IN (SELECT id FROM damaged)
"""
_CONTENT = """
content = CASE WHEN content = 'archived'
    AND NOT EXISTS (SELECT 1 FROM interactions WHERE session_id = sessions.id)
    THEN content ELSE 'deleted' END,
ended_at = COALESCE(ended_at, {now}),
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
    """What was lost of a journal."""

    quarantine: Path
    """The folder that the damaged files were moved to."""
    rows: dict[str, int] = field(default_factory=dict)
    """How many rows of each table could not be read."""
    sessions: int = 0
    """How many sessions were ended for it."""


@dataclass(slots=True)
class _Table:
    """A table of a damaged journal."""

    source: sqlite3.Connection
    name: str
    columns: list[str]
    indexes: list[tuple[str, list[str]]]
    """Names and columns; partial ones are left out."""
    known: dict[int, dict[str, Any]] = field(default_factory=dict)
    """What the indexes know of each row, by its number."""
    complete: bool = False
    """Whether there can be no other rows than these."""

    def look(self) -> None:
        """Find every row's number."""
        listings: list[tuple[str, list[str]]] = [("NOT INDEXED", [])]
        listings += [(f'INDEXED BY "{name}"', columns) for name, columns in self.indexes]
        for how, columns in listings:
            order = columns or ["rowid"]
            whole = []
            for way in ("ASC", "DESC"):
                by = ", ".join(f"{column} {way}" for column in order)
                what = ", ".join(["rowid", *columns])
                sql = f"SELECT {what} FROM {self.name} {how} ORDER BY {by}"
                whole.append(self._listed(sql, columns))
            self.complete = self.complete or any(whole)

    def _listed(self, sql: str, columns: list[str]) -> bool:
        """Take in a listing as far as it can be read; whether that is to its end."""
        try:
            for number, *values in self.source.execute(sql):
                row = self.known.setdefault(number, {})
                row.update(zip(columns, values, strict=True))
        except (sqlite3.DatabaseError, UnicodeDecodeError):
            return False
        return True

    def rows(self) -> Iterator[tuple[int, tuple[Any, ...] | None]]:
        """Each row's number and values, in their order; None where it cannot be read."""
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
        if not isinstance(data, bytes):
            return False
        if "checksum" in values:
            return bool(zlib.crc32(data) == values["checksum"])
        try:
            return bool(unpack_interaction(data).id == values["id"])
        except ValueError:
            return False

    def session_of(self, number: int) -> str | None:
        """Whose row this is, if the indexes or what is left of the row tell."""
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
    """Put a new journal in the damaged one's place; it closes ``source``, the damaged one's.

    ``commits_lost``: the newest state of some rows is missing, nobody knows of which.

    Raises:
        StartupError: nothing can be read of it.
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
    target = sqlite3.connect(new, isolation_level=None)
    try:
        schema.shape(target)
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
    # Before the damaged one moves: there is always one of them to begin with.
    fsync(path.parent)
    _set_aside(path, damage.quarantine)
    # Its file was moved, so closing it does not write the log into it.
    source.close()
    finish(path)
    return damage


def finish(path: Path) -> None:
    """Put a salvaged journal in its place, if there is one: the end of a salvage, or after a kill
    amid one."""
    salvaged = _salvaged(path)
    if not salvaged.exists():
        return
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    _set_aside(path, path.parent / "quarantine" / f"{path.name}-{stamp}")
    salvaged.rename(path)
    fsync(path.parent)


def unusable(path: Path, error: object) -> StartupError:
    """A journal of which nothing can be saved."""
    return StartupError(
        f"the journal {path} is damaged and nothing can be read of it ({error}): put a copy of it "
        "in its place, or move it away and start again without its sessions"
    )


def _salvaged(path: Path) -> Path:
    return path.with_name(f".salvaged-{path.name}")


def _set_aside(path: Path, quarantine: Path) -> None:
    """Move the damaged files; the log first: without its file it is never read."""
    damaged = [path.with_name(path.name + end) for end in ("-wal", "-shm", "")]
    if not any(file.exists() for file in damaged):
        return
    quarantine.mkdir(parents=True, exist_ok=True)
    for file in damaged:
        if file.exists():
            file.rename(quarantine / file.name)
    for folder in (quarantine, quarantine.parent, path.parent):
        fsync(folder)


def _schema(source: sqlite3.Connection) -> tuple[dict[str, str], list[str], int]:
    """The SQL of the tables by their names, that of the indexes, and the version."""
    sql = "SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL"
    items = source.execute(sql).fetchall()
    tables = {name: text for kind, name, text in items if kind == "table"}
    if "sessions" not in tables or "interactions" not in tables:
        raise sqlite3.DatabaseError("its tables are not there")
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
    """The sessions that lost something."""

    content: set[str] = field(default_factory=set)
    history: set[str] = field(default_factory=set)
    """Only rewards as they were given; what they added up to is still there."""
    perhaps: bool = False
    """Others may have lost some of what came last, too."""
    commits: bool = False
    """The newest state of some of them is lost, nobody knows of which."""


def _copy(
    source: sqlite3.Connection,
    target: sqlite3.Connection,
    names: list[str],
    damage: Damage,
    lost: _LostRows,
) -> None:
    for name in names:
        table = _table(source, name)
        table.look()
        numbers = _copy_rows(table, target)
        if numbers:
            damage.rows[name] = len(numbers)
        if name == "sessions":
            lost.content |= _bury(table, target, numbers)
        elif name in _CHILDREN:
            owners = {table.session_of(number) for number in numbers}
            ids = {owner for owner in owners if owner is not None}
            lost.perhaps = lost.perhaps or len(ids) < len(owners) or not table.complete
            if name == "interactions":
                lost.content |= ids
            else:
                lost.history |= ids


def _copy_rows(table: _Table, target: sqlite3.Connection) -> list[int]:
    """The numbers of the rows that could not be read."""
    # A table's own number is its rowid.
    names = table.columns if "number" in table.columns else ["rowid", *table.columns]
    sql = f"INSERT INTO {table.name} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
    lost = []
    for number, row in table.rows():
        try:
            if row is None:
                raise sqlite3.IntegrityError("it cannot be read")
            target.execute(sql, row if len(row) == len(names) else (number, *row))
        except sqlite3.IntegrityError:
            # Also one that the table's own rules refuse: what is read is not what was written.
            lost.append(number)
    return lost


def _bury(table: _Table, target: sqlite3.Connection, lost: list[int]) -> set[str]:
    """Keep the names of sessions whose rows are gone, so that nobody hears they never were."""
    buried = set()
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
            # So that its group has as much time as it can have had.
            "created_at": time.time(),
            "expires_at": time.time(),
        }
        if "content" in table.columns and values["state"] in TERMINAL_STATES:
            # If nothing of it is here; and whoever looks for it there in vain says so.
            values["content"] = "archived"
        marks = ", ".join(f":{name}" for name in values)
        with contextlib.suppress(sqlite3.IntegrityError):
            target.execute(f"INSERT INTO sessions ({', '.join(values)}) VALUES ({marks})", values)
            buried.add(str(known["id"]))
    target.executemany(_LIKE_ITS_GROUP, [(id,) for id in buried])
    return buried


def _end(target: sqlite3.Connection, lost: _LostRows) -> int:
    """End the sessions that lost something, and remove what is left of their content."""
    target.execute("CREATE TEMP TABLE damaged (id TEXT PRIMARY KEY)")
    add = "INSERT OR IGNORE INTO damaged "
    target.executemany(f"{add} VALUES (?)", [(id,) for id in lost.content])
    target.executemany(
        f"{add} SELECT id FROM sessions WHERE id = ? AND {_OPEN}", [(id,) for id in lost.history]
    )
    columns = {row[1] for row in target.execute("PRAGMA table_info(sessions)")}
    counted = "recorded" in columns
    if counted:
        target.execute(f"{add} SELECT id FROM sessions WHERE {_INCOMPLETE}")
    if lost.commits or (lost.perhaps and not counted):
        target.execute(f"{add} SELECT id FROM sessions WHERE {_LIVE}")
    elif lost.perhaps:
        target.execute(f"{add} SELECT id FROM sessions WHERE {_OPEN}")
    also = _CONTENT.format(now=time.time()) if counted else ""
    ended = target.execute(_END.format(also=also)).rowcount
    target.execute("DELETE FROM interactions WHERE session_id IN (SELECT id FROM damaged)")
    return ended
