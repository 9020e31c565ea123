"""The tables of a SQLite journal, and the connections to it."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from any_agent.errors import StoreUnavailable

VERSION = 2
TABLES = """
CREATE TABLE sessions (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, lane TEXT NOT NULL, mode TEXT NOT NULL,
    state TEXT NOT NULL, task_id TEXT, group_id TEXT, group_size INTEGER NOT NULL,
    metadata BLOB NOT NULL, created_at REAL NOT NULL, expires_at REAL NOT NULL,
    final_reward REAL, reason TEXT, owner TEXT, tenant TEXT, opened_by TEXT,
    pinned_version INTEGER, clock TEXT, awaits_until REAL, step INTEGER, ended_at REAL,
    content TEXT NOT NULL
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


def connect(path: Path) -> sqlite3.Connection:
    """Open or create a journal; StoreUnavailable for one of another version."""
    connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
    # Of a new file; it lets what the archives took be given back to the file system in small steps.
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version == 0:
        connection.executescript(f"BEGIN; {TABLES} PRAGMA user_version = {VERSION}; COMMIT;")
    elif version != VERSION:
        connection.close()
        raise StoreUnavailable(
            f"the journal {path} has format {version}, this service writes {VERSION}; "
            "choose another trial"
        )
    connection.row_factory = sqlite3.Row
    return connection
