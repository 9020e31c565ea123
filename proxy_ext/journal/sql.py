"""SQL of the statements. The costly packing happens here, before the writer's transaction."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any, TypeAlias

import orjson

from any_agent.record import pack_interaction
from proxy_ext.journal.base import (
    ArchiveContent,
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

Prepared: TypeAlias = tuple[tuple[str, tuple[Any, ...]], ...]
"""SQL with its values, in the order of their execution."""

SESSION_FIELDS = tuple(SessionRow.__dataclass_fields__)
_PUT_SESSION = (
    f"INSERT INTO sessions ({', '.join(SESSION_FIELDS)}) "
    f"VALUES ({', '.join('?' * len(SESSION_FIELDS))})"
)
_SEAL = (
    "recorded = COALESCE(recorded, "
    "(SELECT COUNT(*) FROM interactions WHERE session_id = sessions.id))"
)
_AMONG = "IN (SELECT value FROM json_each(?))"
_PUT_INTERACTION = """
INSERT INTO interactions
    (id, session_id, data, checksum, reward, key, request_hash, retry_count)
VALUES (?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET
    data = excluded.data, checksum = excluded.checksum, reward = excluded.reward,
    key = COALESCE(excluded.key, key),
    request_hash = COALESCE(excluded.request_hash, request_hash),
    retry_count = COALESCE(excluded.retry_count, retry_count)
"""


def prepare(statement: Statement) -> Prepared:
    s = statement
    match s:
        case PutSession(row):
            fields = {name: getattr(row, name) for name in SESSION_FIELDS}
            fields |= {"metadata": orjson.dumps(row.metadata), "state": str(row.state)}
            return ((_PUT_SESSION, tuple(fields.values())),)
        case SetState():
            sql = (
                "UPDATE sessions SET state = ?, reason = ?, owner = ?, step = ?, ended_at = ?, "
                f"awaits_until = NULL, {_SEAL} WHERE id {_AMONG}"
            )
            return ((sql, (str(s.state), s.reason, s.owner, s.step, s.at, _ids(s.session_ids))),)
        case SetAwaiting(session_id, until):
            sql = (
                f"UPDATE sessions SET state = 'awaiting_reward', awaits_until = ?, {_SEAL} "
                "WHERE id = ?"
            )
            return ((sql, (until, session_id)),)
        case PutInteraction(i, key, mark):
            data = pack_interaction(i)
            request = (None, None) if mark is None else (mark.hash, mark.retry_count)
            values = (i.id, i.session_id, data, zlib.crc32(data), i.reward, key, *request)
            return ((_PUT_INTERACTION, values),)
        case SetReward():
            history = (
                "INSERT INTO rewards (session_id, interaction_id, name, value, by, at) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (s.session_id, s.interaction_id, s.name, s.value, s.by, s.at),
            )
            if s.interaction_id is None:
                sql = "UPDATE sessions SET final_reward = ? WHERE id = ?"
            else:
                sql = "UPDATE interactions SET reward = ? WHERE id = ?"
            return (history, (sql, (s.combined, s.interaction_id or s.session_id)))
        case MarkDelivered(ids):
            return ((f"UPDATE interactions SET delivered = 1 WHERE id {_AMONG}", (_ids(ids),)),)
        case PutAnswer():
            sql = (
                "INSERT INTO answers (scope, key, request_hash, status, body, created_at) "
                "VALUES (?, ?, ?, ?, ?, ?)"
            )
            return ((sql, (s.scope, s.key, s.request_hash, s.status, s.body, s.created_at)),)
        case DropAnswers(before):
            return (("DELETE FROM answers WHERE created_at < ?", (before,)),)
        case EraseContent(ids):
            return _drop_content(ids, "deleted")
        case ArchiveContent(ids):
            rewards = (f"DELETE FROM rewards WHERE session_id {_AMONG}", (_ids(ids),))
            return (rewards, *_drop_content(ids, "archived"))
        case PutMeta(key, value):
            sql = "INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)"
            return ((sql, (key, orjson.dumps(value))),)


def _drop_content(session_ids: Iterable[str], content: str) -> Prepared:
    ids = _ids(session_ids)
    rows = f"UPDATE sessions SET content = ?, metadata = ? WHERE id {_AMONG}"
    return (
        (f"DELETE FROM interactions WHERE session_id {_AMONG}", (ids,)),
        (rows, (content, b"{}", ids)),
    )


def _ids(ids: Iterable[str]) -> str:
    return orjson.dumps(list(ids)).decode()
