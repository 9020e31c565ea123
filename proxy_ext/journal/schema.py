"""The tables of a SQLite journal, their version, and its settings."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from any_agent.errors import StartupError
from any_agent.rundir import usage
from any_agent.runtime.atomic_files import create_empty, fsync

VERSION = 5
TABLES = f"""
CREATE TABLE sessions (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, lane TEXT NOT NULL, mode TEXT NOT NULL,
    state TEXT NOT NULL, task_id TEXT, group_id TEXT, group_size INTEGER NOT NULL,
    metadata BLOB NOT NULL, created_at REAL NOT NULL, expires_at REAL NOT NULL,
    final_reward REAL, reason TEXT, owner TEXT, tenant TEXT, opened_by TEXT,
    pinned_version INTEGER, clock TEXT, awaits_until REAL, step INTEGER, ended_at REAL,
    content TEXT NOT NULL DEFAULT 'stored', recorded INTEGER,
    rewarded_by TEXT NOT NULL DEFAULT 'agent'
) STRICT;
CREATE INDEX sessions_by_state ON sessions (state, mode);
CREATE INDEX sessions_by_group ON sessions (group_id);
CREATE INDEX sessions_by_lane ON sessions (lane);
CREATE INDEX sessions_by_task ON sessions (task_id) WHERE task_id IS NOT NULL;
CREATE INDEX sessions_by_end ON sessions (ended_at) WHERE content = 'stored';
CREATE TABLE interactions (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, session_id TEXT NOT NULL,
    data BLOB NOT NULL, checksum INTEGER NOT NULL, reward REAL, key BLOB, request_hash BLOB,
    retry_count INTEGER, delivered INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX interactions_by_session ON interactions (session_id);
CREATE TABLE rewards (
    number INTEGER PRIMARY KEY, session_id TEXT NOT NULL, interaction_id TEXT, name TEXT,
    value REAL, by TEXT NOT NULL, at REAL NOT NULL, text TEXT
) STRICT;
CREATE INDEX rewards_by_session ON rewards (session_id);
CREATE TABLE answers (
    scope TEXT NOT NULL, key TEXT NOT NULL, request_hash BLOB NOT NULL, status INTEGER NOT NULL,
    body BLOB NOT NULL, created_at REAL NOT NULL, PRIMARY KEY (scope, key)
) STRICT;
CREATE INDEX answers_by_time ON answers (created_at);
CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB NOT NULL) STRICT;
{usage.TABLE}"""
"""``recorded``: the number of a session's interactions when its calls ended, so that a missing one
is noticed; ``checksum``: the CRC-32 of ``data``."""
_PAGE_BYTES = 16_384
"""SQLite begins a new page for a row that does not fit into the last one: with its default of 4 KB,
every turn of some hundred tokens would take a page of its own."""
_CHECKPOINT_LOG_BYTES = 4 << 20  # the log is copied into the file when it has this size
_MAX_LOG_BYTES = 16 << 20  # to which a log that had to grow further is cut
_CACHE_KB = 16_384  # so that a commit of many rows is written once, at its end


def create(path: Path) -> None:
    """Create a journal atomically: after a crash it is complete or does not exist."""
    new = path.with_name(f".new-{path.name}")
    new.unlink(missing_ok=True)
    create_empty(new)
    connection = sqlite3.connect(new, isolation_level=None)
    try:
        set_file_format(connection)
        connection.executescript(f"BEGIN; {TABLES} PRAGMA user_version = {VERSION}; COMMIT;")
    finally:
        connection.close()
    fsync(new)
    new.rename(path)
    fsync(path.parent)
    fsync(path.parent.parent)


def set_file_format(connection: sqlite3.Connection) -> None:
    """Set what SQLite takes only before a file's first table."""
    connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
    # So that space freed by archiving can go back to the file system in small steps.
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")


def require_version(connection: sqlite3.Connection, path: Path) -> None:
    """Raise StartupError for a file that is no journal of this version."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version == 0:
        raise StartupError(
            f"{path} is not a journal: move it away and start again, or choose another --trial"
        )
    if version != VERSION:
        raise StartupError(
            f"the journal {path} has version {version}, and this any-agent knows {VERSION}: "
            "use the any-agent that wrote it, or choose another --trial"
        )


def configure(connection: sqlite3.Connection) -> None:
    """Apply the settings of a journal in use."""
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    (page_size,) = connection.execute("PRAGMA page_size").fetchone()
    connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_LOG_BYTES // page_size}")
    connection.execute(f"PRAGMA journal_size_limit = {_MAX_LOG_BYTES}")
    connection.execute(f"PRAGMA cache_size = -{_CACHE_KB}")
    # Deleted content is overwritten with zeros.
    connection.execute("PRAGMA secure_delete = ON")
    connection.row_factory = sqlite3.Row
