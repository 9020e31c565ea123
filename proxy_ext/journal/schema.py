"""The tables of a SQLite journal, their migration from earlier versions, and its settings."""

from __future__ import annotations

import sqlite3
import zlib
from pathlib import Path

from any_agent.errors import StartupError
from any_agent.runtime.atomic_files import create_empty, fsync

VERSION = 3
TABLES = """
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
CREATE INDEX sessions_by_end ON sessions (ended_at) WHERE content = 'stored';
CREATE TABLE interactions (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, session_id TEXT NOT NULL,
    data BLOB NOT NULL, checksum INTEGER NOT NULL, reward REAL, key BLOB, request_hash BLOB,
    retry_count INTEGER, delivered INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX interactions_by_session ON interactions (session_id);
CREATE TABLE rewards (
    number INTEGER PRIMARY KEY, session_id TEXT NOT NULL, interaction_id TEXT, name TEXT,
    value REAL NOT NULL, by TEXT NOT NULL, at REAL NOT NULL
) STRICT;
CREATE INDEX rewards_by_session ON rewards (session_id);
CREATE TABLE answers (
    scope TEXT NOT NULL, key TEXT NOT NULL, request_hash BLOB NOT NULL, status INTEGER NOT NULL,
    body BLOB NOT NULL, created_at REAL NOT NULL, PRIMARY KEY (scope, key)
) STRICT;
CREATE INDEX answers_by_time ON answers (created_at);
CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB NOT NULL) STRICT;
"""
"""``recorded``: the number of a session's interactions when its calls ended, so that a missing one
is noticed; ``checksum``: the CRC-32 of ``data``."""
_FROM_1 = f"""
BEGIN IMMEDIATE;
DROP INDEX sessions_by_state;
DROP INDEX sessions_by_group;
DROP INDEX sessions_by_lane;
DROP INDEX interactions_by_session;
ALTER TABLE sessions RENAME TO sessions_1;
ALTER TABLE interactions RENAME TO interactions_1;
ALTER TABLE meta RENAME TO meta_1;
{TABLES}
INSERT INTO sessions (
    id, lane, mode, state, task_id, group_id, group_size, metadata, created_at, expires_at,
    final_reward, reason, owner, ended_at, recorded
) SELECT
    id, lane, mode, state, task_id, group_id, group_size, metadata, created_at, expires_at,
    final_reward, reason, owner,
    CASE WHEN state IN ('trained', 'rejected', 'evaluated', 'expired', 'aborted')
    THEN expires_at END,
    CASE WHEN state <> 'open'
    THEN (SELECT COUNT(*) FROM interactions_1 WHERE session_id = sessions_1.id) END
FROM sessions_1 ORDER BY created_at, rowid;
INSERT INTO interactions (number, id, session_id, data, checksum, reward)
SELECT number, id, session_id, data, checksum_of(data), reward FROM interactions_1;
INSERT INTO meta SELECT key, value FROM meta_1;
DROP TABLE sessions_1;
DROP TABLE interactions_1;
DROP TABLE meta_1;
PRAGMA user_version = 3;
COMMIT;
"""
"""Version 1 did not store the end of a session, which is its expiry at the latest."""
_FROM_2 = """
BEGIN IMMEDIATE;
ALTER TABLE sessions ADD COLUMN rewarded_by TEXT NOT NULL DEFAULT 'agent';
PRAGMA user_version = 3;
COMMIT;
"""
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


def version_of(connection: sqlite3.Connection, path: Path) -> int:
    """Return the journal's version; StartupError for one that this service cannot use."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > VERSION:
        raise StartupError(
            f"the journal {path} has version {version}, and this any-agent knows {VERSION}: "
            "use the newer any-agent that wrote it, or choose another --trial"
        )
    if version == 0:
        raise StartupError(
            f"{path} is not a journal: move it away and start again, or choose another --trial"
        )
    return int(version)


def migrate(connection: sqlite3.Connection, version: int) -> None:
    """Migrate a journal of an earlier version to this one in one transaction."""
    connection.create_function("checksum_of", 1, zlib.crc32, deterministic=True)
    try:
        connection.executescript(_FROM_1 if version == 1 else _FROM_2)
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


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
