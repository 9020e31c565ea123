"""The statements of a journal as lines: the name of a SQL command, and its values.

A line has nothing but texts, numbers and bytes, so that a log can carry it to another machine, that
runs it on the same tables with the same result. No SQL is carried: a name that is not here is
refused.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias

import orjson

from any_agent.record import pack_interaction
from any_agent.rundir import usage
from proxy_ext.journal.base import (
    ArchiveContent,
    CountUsage,
    DropAnswers,
    EraseContent,
    MarkDelivered,
    PutAnswer,
    PutInteraction,
    PutMeta,
    PutSession,
    SessionRow,
    SetAwaiting,
    SetReward,
    SetState,
    Statement,
)

Value: TypeAlias = str | int | float | bytes | None
Line: TypeAlias = tuple[str, tuple[Value, ...]]

SESSION_FIELDS = tuple(SessionRow.__dataclass_fields__)
_SEAL = (
    "recorded = COALESCE(recorded, "
    "(SELECT COUNT(*) FROM interactions WHERE session_id = sessions.id))"
)
_AMONG = "IN (SELECT value FROM json_each(?))"
_SQL: Mapping[str, str] = {
    "put_session": (
        f"INSERT INTO sessions ({', '.join(SESSION_FIELDS)}) "
        f"VALUES ({', '.join('?' * len(SESSION_FIELDS))})"
    ),
    "set_state": (
        "UPDATE sessions SET state = ?, reason = ?, owner = ?, step = ?, ended_at = ?, "
        f"awaits_until = NULL, {_SEAL} WHERE id {_AMONG}"
    ),
    "set_awaiting": (
        f"UPDATE sessions SET state = 'awaiting_reward', awaits_until = ?, {_SEAL} WHERE id = ?"
    ),
    "put_interaction": """
INSERT INTO interactions
    (id, session_id, data, checksum, reward, key, request_hash, retry_count)
VALUES (?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET
    data = excluded.data, checksum = excluded.checksum, reward = excluded.reward,
    key = COALESCE(excluded.key, key),
    request_hash = COALESCE(excluded.request_hash, request_hash),
    retry_count = COALESCE(excluded.retry_count, retry_count)
""",
    "add_reward": (
        "INSERT INTO rewards (session_id, interaction_id, name, value, by, at, text) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)"
    ),
    "set_final_reward": "UPDATE sessions SET final_reward = ? WHERE id = ?",
    "set_reward": "UPDATE interactions SET reward = ? WHERE id = ?",
    "mark_delivered": f"UPDATE interactions SET delivered = 1 WHERE id {_AMONG}",
    "put_answer": (
        "INSERT INTO answers (scope, key, request_hash, status, body, created_at) "
        "VALUES (?, ?, ?, ?, ?, ?)"
    ),
    "drop_answers": "DELETE FROM answers WHERE created_at < ?",
    "drop_rewards": f"DELETE FROM rewards WHERE session_id {_AMONG}",
    "drop_words": f"DELETE FROM rewards WHERE value IS NULL AND session_id {_AMONG}",
    "drop_texts": f"UPDATE rewards SET text = NULL WHERE session_id {_AMONG}",
    "drop_interactions": f"DELETE FROM interactions WHERE session_id {_AMONG}",
    "set_content": f"UPDATE sessions SET content = ?, metadata = ? WHERE id {_AMONG}",
    "count_usage": usage.ADD,
    "put_meta": "INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)",
}


_PLACE = "log"
"""The key in `meta` of the place in a log: its run, and the number of the last commit."""
_UNSYNCED = "unsynced"
"""The key in `meta` of the mark of a process that writes the file without syncs."""


class Unsynced(NamedTuple):
    """The mark of a process that writes a journal's file without syncs."""

    boot: str
    """The id of its machine's boot."""
    claim: int
    """Its claim of the log."""


def place_of(connection: sqlite3.Connection) -> tuple[str, int]:
    """Return the run and the number of the last commit that a file has of a log; ("", 0): none."""
    row = connection.execute("SELECT value FROM meta WHERE key = ?", (_PLACE,)).fetchone()
    if row is None:
        return "", 0
    place = orjson.loads(row[0])
    return str(place["run"]), int(place["seq"])


def set_place(connection: sqlite3.Connection, run: str, seq: int) -> None:
    """Store the place in the file's transaction."""
    value = orjson.dumps({"run": run, "seq": seq})
    connection.execute(_SQL["put_meta"], (_PLACE, value))


def unsynced_by(connection: sqlite3.Connection) -> Unsynced | None:
    """Return the process that began to write the file without syncs; None: all of it is synced."""
    row = connection.execute("SELECT value FROM meta WHERE key = ?", (_UNSYNCED,)).fetchone()
    return None if row is None else Unsynced(*orjson.loads(row[0]))


def set_unsynced(connection: sqlite3.Connection, mark: Unsynced) -> None:
    connection.execute(_SQL["put_meta"], (_UNSYNCED, orjson.dumps(tuple(mark))))


def clear_unsynced(connection: sqlite3.Connection, mark: Unsynced) -> None:
    """Remove the mark, unless it is another process's."""
    values = (_UNSYNCED, orjson.dumps(tuple(mark)))
    connection.execute("DELETE FROM meta WHERE key = ? AND value = ?", values)


def run_lines(connection: sqlite3.Connection, lines: Iterable[Line]) -> None:
    """Execute lines in the connection's transaction; KeyError for an unknown name."""
    for name, values in lines:
        connection.execute(_SQL[name], values)


def lines_of(statement: Statement) -> tuple[Line, ...]:
    """Return a statement's lines. The costly packing of tokens happens here."""
    s = statement
    match s:
        case PutSession(row):
            fields = {name: getattr(row, name) for name in SESSION_FIELDS}
            fields |= {"metadata": orjson.dumps(row.metadata), "state": str(row.state)}
            return (("put_session", tuple(fields.values())),)
        case SetState():
            values = (str(s.state), s.reason, s.owner, s.step, s.at, _ids(s.session_ids))
            return (("set_state", values),)
        case SetAwaiting(session_id, until):
            return (("set_awaiting", (until, session_id)),)
        case PutInteraction(i, key, mark):
            data = pack_interaction(i)
            request = (None, None) if mark is None else (mark.hash, mark.retry_count)
            row_values = (i.id, i.session_id, data, zlib.crc32(data), i.reward, key, *request)
            return (("put_interaction", row_values),)
        case SetReward():
            history = (s.session_id, s.interaction_id, s.name, s.value, s.by, s.at, s.text)
            if s.combined is None:
                return (("add_reward", history),)
            if s.interaction_id is None:
                combined: Line = ("set_final_reward", (s.combined, s.session_id))
            else:
                combined = ("set_reward", (s.combined, s.interaction_id))
            return (("add_reward", history), combined)
        case MarkDelivered(ids):
            return (("mark_delivered", (_ids(ids),)),)
        case PutAnswer():
            answer = (s.scope, s.key, s.request_hash, s.status, s.body, s.created_at)
            return (("put_answer", answer),)
        case DropAnswers(before):
            return (("drop_answers", (before,)),)
        case EraseContent(ids):
            words = (("drop_words", (_ids(ids),)), ("drop_texts", (_ids(ids),)))
            return (*words, *_drop_content(ids, "deleted"))
        case ArchiveContent(ids):
            return (("drop_rewards", (_ids(ids),)), *_drop_content(ids, "archived"))
        case CountUsage():
            return (("count_usage", (s.day, s.prompt_tokens, s.sampled_tokens, s.calls)),)
        case PutMeta(key, value):
            return (("put_meta", (key, orjson.dumps(value))),)


def _drop_content(session_ids: Iterable[str], content: str) -> tuple[Line, ...]:
    ids = _ids(session_ids)
    return (("drop_interactions", (ids,)), ("set_content", (content, b"{}", ids)))


def _ids(ids: Iterable[str]) -> str:
    return orjson.dumps(list(ids)).decode()
