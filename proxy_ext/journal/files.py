"""The file of a SQLite journal: created, checked, salvaged, opened."""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from pathlib import Path

from any_agent.errors import StartupError
from any_agent.runtime import boot_clock
from any_agent.runtime.atomic_files import fsync, make_folder
from proxy_ext.journal import salvage, schema
from proxy_ext.journal.statements import Unsynced, clear_unsynced, set_unsynced, unsynced_by
from proxy_ext.journal.wal import has_lost_commits

log = logging.getLogger(__name__)

_MAX_CHECKED_BYTES = 256 << 20
"""Size up to which the whole file is checked, which takes 0.1 s if it is in the page cache. In a
larger file the interactions are left out; their checksums are checked when they are read."""
_FULL_CHECK = ("PRAGMA integrity_check",)
_PARTIAL_CHECK = tuple(
    f"PRAGMA integrity_check({table})" for table in ("sessions", "rewards", "answers", "meta")
)


def open_file(path: Path) -> tuple[sqlite3.Connection, salvage.Damage | None]:
    """Return the connection to a journal, created if it is new, and the damage if it had any.

    Raises:
        StartupError: it cannot be used; the message says what to do.
    """
    try:
        make_folder(path.parent)
        salvage.finish(path)
        if not path.exists():
            schema.create(path)
        damage = _checked(path)
        connection = _connect(path)
        try:
            schema.configure(connection)
            schema.require_version(connection, path)
        except BaseException:
            connection.close()
            raise
    except (OSError, sqlite3.Error) as error:
        raise StartupError(
            f"cannot open the journal {path}: {error}; check the disk and its permissions"
        ) from error
    return connection, damage


def open_reader(path: Path) -> sqlite3.Connection:
    """Return one more connection to a journal in use, which cannot write."""
    connection = _connect(path)
    connection.execute("PRAGMA query_only = ON")
    connection.row_factory = sqlite3.Row
    return connection


def is_whole(path: Path) -> bool:
    """Return whether what was written to a journal is there: its machine did not stop meanwhile, or
    all is synced. No other connection of this process may be open."""
    try:
        # The file alone: to read its log would be to cut it before it was checked.
        only = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
        with contextlib.closing(sqlite3.connect(only, uri=True)) as connection:
            mark = unsynced_by(connection)
            return mark is None or was_now(mark)
    except (sqlite3.Error, KeyError, TypeError, ValueError):
        return False


def was_now(mark: Unsynced) -> bool:
    """Return whether a process of the machine's present boot made the mark: what it wrote, the
    machine has."""
    return mark.boot != "" and mark.boot == boot_clock.boot_id()


def begin_unsynced(connection: sqlite3.Connection, claim: int) -> bool:
    """Note in the file itself, synced, that what follows is not; return whether that was possible.

    While another process reads the file the note stays in its log, which may be lost.
    """
    try:
        set_unsynced(connection, Unsynced(boot_clock.boot_id(), claim))
        (busy, *_) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    except sqlite3.OperationalError as error:
        log.warning("a journal is synced, because it cannot be noted that it is not: %s", error)
        return False
    return not busy


def sync(path: Path, mark: Unsynced) -> None:
    """Sync a journal that was written without syncs, and then remove the mark, unless a process
    with another one writes it now.

    No connection of this process may be open: to close a file is to lose the locks on it.
    """
    for noted in (False, True):
        with contextlib.closing(_connect(path)) as connection:
            connection.execute("PRAGMA synchronous = FULL")
            if noted:
                clear_unsynced(connection, mark)
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        fsync(path)


def mark_damaged(path: Path) -> None:
    """Let the next start salvage the journal, even if its check finds no damage."""
    with contextlib.suppress(OSError):
        _mark(path).touch(0o600)


def _mark(path: Path) -> Path:
    return path.with_name(f".damaged-{path.name}")


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, check_same_thread=False, isolation_level=None)


def _checked(path: Path) -> salvage.Damage | None:
    """Check the journal and salvage a damaged one; return the damage."""
    if path.stat().st_size == 0:
        raise salvage.unusable(path, "it is empty")
    damage = None
    # Before SQLite opens the log, which it truncates at the first unreadable frame.
    commits_lost = has_lost_commits(path.with_name(f"{path.name}-wal"))
    size = path.stat().st_size
    full_size = _expected_size(path)
    truncated = full_size > size
    if truncated:
        # SQLite reads nothing at all of a file that is too short.
        os.truncate(path, full_size)
    connection = _connect(path)
    try:
        problem = _problem(connection, path)
        if problem is None and truncated:
            # Only free pages are gone, which no check needs but SQLite does.
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
        if truncated:
            kept = path if damage is None else damage.quarantine / path.name
            os.truncate(kept, size)
    rows = ", ".join(f"{number} of {table}" for table, number in damage.rows.items())
    log.error(
        "the journal %s was damaged (%s); rows that could not be read: %s; sessions ended for it: "
        "%d, never trained on; all other sessions continue. The damaged file is kept in %s: check "
        "the disk, and delete the file when you do not need it",
        path,
        problem,
        rows or "none",
        damage.sessions,
        damage.quarantine,
    )
    return damage


def _expected_size(path: Path) -> int:
    """Return the file's size by its own header; 0 if the log decides instead."""
    log_file = path.with_name(f"{path.name}-wal")
    if log_file.exists() and log_file.stat().st_size > 0:
        return 0
    with path.open("rb") as file:
        head = file.read(32)
    if not head.startswith(b"SQLite format 3\0") or len(head) < 32:
        return 0
    page_size = int.from_bytes(head[16:18], "big")
    # The header stores 65,536 as 1.
    return (65_536 if page_size == 1 else page_size) * int.from_bytes(head[28:32], "big")


def _problem(connection: sqlite3.Connection, path: Path) -> str | None:
    """Return a problem that SQLite's check finds; None if there is none."""
    try:
        schema.require_version(connection, path)
        full = path.stat().st_size <= _MAX_CHECKED_BYTES
        for sql in _FULL_CHECK if full else _PARTIAL_CHECK:
            for (found,) in connection.execute(sql):
                if found != "ok":
                    return " ".join(str(found).split())[:200]
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError):
            raise
        return str(error)
    return None
