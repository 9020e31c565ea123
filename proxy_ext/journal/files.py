"""A journal's files: created, checked, salvaged, migrated, opened."""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from pathlib import Path

from any_agent.errors import StartupError
from proxy_ext.journal import salvage, schema
from proxy_ext.journal.wal import has_lost_commits

log = logging.getLogger(__name__)

_CHECKED_WHOLE = 256 << 20
"""Bytes. Checking them takes 0.1 s if they are in the page cache, else as long as reading them. Of
a larger journal everything but the interactions is checked; these have checksums, for when they
are read."""
_WHOLE = ("PRAGMA integrity_check",)
_PARTS = tuple(
    f"PRAGMA integrity_check({table})" for table in ("sessions", "rewards", "answers", "meta")
)


def open_file(path: Path) -> tuple[sqlite3.Connection, salvage.Damage | None]:
    """The connection to a journal that may be new, and what was lost of one that was damaged.

    Raises:
        StartupError: it cannot be used; the message says what to do.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        salvage.finish(path)
        if not path.exists():
            schema.create(path)
        damage = _checked(path)
        connection = _connect(path)
        try:
            schema.settle(connection)
            if schema.version_of(connection, path) < schema.VERSION:
                schema.migrate(connection)
        except BaseException:
            connection.close()
            raise
    except (OSError, sqlite3.Error) as error:
        raise StartupError(f"cannot open the journal {path}: {error}") from error
    return connection, damage


def mark_damaged(path: Path) -> None:
    """Have the next start salvage the journal, whether or not its check finds what we found."""
    with contextlib.suppress(OSError):
        _mark(path).touch()


def _mark(path: Path) -> Path:
    return path.with_name(f".damaged-{path.name}")


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, check_same_thread=False, isolation_level=None)


def _checked(path: Path) -> salvage.Damage | None:
    """Leave a sound journal at the path; what was lost if it was not."""
    if path.stat().st_size == 0:
        raise salvage.unusable(path, "it is empty")
    damage = None
    # Before SQLite sees the log, which it cuts off where it cannot read on.
    commits_lost = has_lost_commits(path.with_name(f"{path.name}-wal"))
    size = path.stat().st_size
    cut_off = _whole_size(path) > size
    if cut_off:
        # SQLite reads nothing at all of such a file.
        os.truncate(path, _whole_size(path))
    connection = _connect(path)
    try:
        problem = _problem(connection, path)
        if problem is None and cut_off:
            # What is gone was free: no check misses it, but SQLite does.
            problem = "it is shorter than its own header says"
        if problem is None and commits_lost:
            problem = "its log is damaged, and the newest commits are lost"
        if problem is None and _mark(path).exists():
            problem = "it was found damaged while it was used"
        if problem is None:
            return None
        damage = salvage.salvage(connection, path, commits_lost=commits_lost)
        _mark(path).unlink(missing_ok=True)
    finally:
        connection.close()
        if cut_off:
            kept = path if damage is None else damage.quarantine / path.name
            os.truncate(kept, size)
    rows = ", ".join(f"{number} of {table}" for table, number in damage.rows.items())
    log.error(
        "the journal %s was damaged (%s); rows that could not be read: %s; sessions ended for it: "
        "%d, never trained on; everything else goes on. The damaged file is kept in %s: check the "
        "disk, and delete it when you do not need it",
        path,
        problem,
        rows or "none",
        damage.sessions,
        damage.quarantine,
    )
    return damage


def _whole_size(path: Path) -> int:
    """The bytes that the file is to have, by its own header; 0 if the log tells instead."""
    log_file = path.with_name(f"{path.name}-wal")
    if log_file.exists() and log_file.stat().st_size > 0:
        return 0
    with path.open("rb") as file:
        head = file.read(32)
    if not head.startswith(b"SQLite format 3\0") or len(head) < 32:
        return 0
    page_size = int.from_bytes(head[16:18], "big")
    # 65,536 does not fit in there.
    return (65_536 if page_size == 1 else page_size) * int.from_bytes(head[28:32], "big")


def _problem(connection: sqlite3.Connection, path: Path) -> str | None:
    """What is wrong with the file; None if nothing is."""
    try:
        version = schema.version_of(connection, path)
        whole = path.stat().st_size <= _CHECKED_WHOLE or version < schema.VERSION
        for sql in _WHOLE if whole else _PARTS:
            for (found,) in connection.execute(sql):
                if found != "ok":
                    return " ".join(str(found).split())[:200]
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError):
            raise
        return str(error)
    return None
