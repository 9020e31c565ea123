"""SQL of the statements. The costly packing happens here, before the writer's transaction."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable
from typing import Any, TypeAlias

import orjson

from any_agent.record import pack_interaction
from proxy_ext.journal.rows import SessionRow
from proxy_ext.journal.statements import (
    ArchiveContent,
    DropAnswers,
    EraseContent,
    MarkDelivered,
    PutAnswer,
    PutInteraction,
    PutMeta,
    PutSession,
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


@functools.singledispatch
def prepare(statement: Statement) -> Prepared:
    """Return the SQL of a statement."""
    raise TypeError(f"the journal cannot write {type(statement).__name__}")


@prepare.register
def _(statement: PutSession) -> Prepared:
    row = statement.row
    values = {name: getattr(row, name) for name in SESSION_FIELDS}
    values |= {"metadata": orjson.dumps(row.metadata), "state": str(row.state)}
    return ((_PUT_SESSION, tuple(values.values())),)


@prepare.register
def _(statement: SetState) -> Prepared:
    s = statement
    sql = (
        "UPDATE sessions SET state = ?, reason = ?, owner = ?, step = ?, ended_at = ?, "
        f"awaits_until = NULL, {_SEAL} WHERE id {_AMONG}"
    )
    return ((sql, (str(s.state), s.reason, s.owner, s.step, s.at, _ids(s.session_ids))),)


@prepare.register
def _(statement: SetAwaiting) -> Prepared:
    sql = f"UPDATE sessions SET state = 'awaiting_reward', awaits_until = ?, {_SEAL} WHERE id = ?"
    return ((sql, (statement.until, statement.session_id)),)


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


@prepare.register
def _(statement: PutInteraction) -> Prepared:
    i, mark = statement.interaction, statement.request
    data = pack_interaction(i)
    request = (None, None) if mark is None else (mark.hash, mark.retry_count)
    values = (i.id, i.session_id, data, zlib.crc32(data), i.reward, statement.key, *request)
    return ((_PUT_INTERACTION, values),)


@prepare.register
def _(statement: SetReward) -> Prepared:
    s = statement
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


@prepare.register
def _(statement: MarkDelivered) -> Prepared:
    sql = f"UPDATE interactions SET delivered = 1 WHERE id {_AMONG}"
    return ((sql, (_ids(statement.interaction_ids),)),)


@prepare.register
def _(statement: PutAnswer) -> Prepared:
    s = statement
    sql = (
        "INSERT INTO answers (scope, key, request_hash, status, body, created_at) "
        "VALUES (?, ?, ?, ?, ?, ?)"
    )
    return ((sql, (s.scope, s.key, s.request_hash, s.status, s.body, s.created_at)),)


@prepare.register
def _(statement: DropAnswers) -> Prepared:
    return (("DELETE FROM answers WHERE created_at < ?", (statement.before,)),)


@prepare.register
def _(statement: EraseContent) -> Prepared:
    ids = _ids(statement.session_ids)
    rows = f"UPDATE sessions SET content = 'deleted', metadata = ? WHERE id {_AMONG}"
    return (
        (f"DELETE FROM interactions WHERE session_id {_AMONG}", (ids,)),
        (rows, (b"{}", ids)),
    )


@prepare.register
def _(statement: ArchiveContent) -> Prepared:
    ids = _ids(statement.session_ids)
    rows = f"UPDATE sessions SET content = 'archived', metadata = ? WHERE id {_AMONG}"
    return (
        (f"DELETE FROM interactions WHERE session_id {_AMONG}", (ids,)),
        (f"DELETE FROM rewards WHERE session_id {_AMONG}", (ids,)),
        (rows, (b"{}", ids)),
    )


@prepare.register
def _(statement: PutMeta) -> Prepared:
    values = (statement.key, orjson.dumps(statement.value))
    return (("INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)", values),)


def _ids(ids: Iterable[str]) -> str:
    return orjson.dumps(list(ids)).decode()
