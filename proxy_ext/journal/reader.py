"""A reader of a SQLite journal that another process may be using: it never writes."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from any_agent.errors import StartupError
from any_agent.record import unpack_interaction
from any_agent.types import Interaction
from proxy_ext.journal import schema
from proxy_ext.journal.base import RewardRow, SessionRow
from proxy_ext.journal.sqlite import session_row
from proxy_ext.journal.writer import is_damage

# By number: with any other index each step would scan all remaining rows.
_NEXT = """
SELECT * FROM sessions NOT INDEXED
WHERE number > :number AND number <= :last AND content <> 'deleted'
    AND (:states = '[]' OR state IN (SELECT value FROM json_each(:states)))
    AND (:task_id IS NULL OR task_id = :task_id) AND (:since IS NULL OR created_at >= :since)
    AND (:session_id IS NULL OR id = :session_id)
ORDER BY number LIMIT 1
"""


@dataclass(frozen=True, slots=True)
class ExportFilter:
    """A choice of sessions; a field that is None or empty matches all."""

    states: Sequence[str] = ()
    task_id: str | None = None
    since: float | None = None
    """The earliest creation, in seconds since the epoch."""
    session_id: str | None = None

    def matches(self, session: Mapping[str, Any]) -> bool:
        """Judge a session as archives have it."""
        return (
            (not self.states or session["state"] in self.states)
            and (self.task_id is None or session["task_id"] == self.task_id)
            and (self.since is None or session["created_at"] >= self.since)
            and (self.session_id is None or session["id"] == self.session_id)
        )


class StoredSession(NamedTuple):
    """One session with its rewards and interactions, which are empty if an archive has them."""

    number: int
    row: SessionRow
    rewards: list[RewardRow]
    interactions: list[Interaction]


class DamagedSession(NamedTuple):
    """A session that cannot be read."""

    id: str
    problem: str


class JournalReader:
    """Reads a journal one session at a time, each in a transaction of its own.

    So a running service need not wait. Every method raises StartupError if the file cannot be read
    at all.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._readable():
            uri = f"{path.absolute().as_uri()}?mode=ro"
            self._connection = sqlite3.connect(uri, uri=True, timeout=30, isolation_level=None)
            self._connection.row_factory = sqlite3.Row
            try:
                schema.require_version(self._connection, path)
            except BaseException:
                self._connection.close()
                raise

    def close(self) -> None:
        self._connection.close()

    def has(self, session_id: str) -> bool:
        """Return whether the journal has a row of this session."""
        sql = "SELECT 1 FROM sessions WHERE id = ?"
        with self._readable():
            return self._connection.execute(sql, (session_id,)).fetchone() is not None

    def is_deleted(self, number: int) -> bool:
        """Return whether the content of a session is deleted by now."""
        sql = "SELECT content FROM sessions WHERE number = ?"
        with self._readable():
            row = self._connection.execute(sql, (number,)).fetchone()
        return row is not None and row["content"] == "deleted"

    def content_bytes(self, session_ids: Iterable[str]) -> int:
        """Return the bytes that the interactions of these sessions take, without indexes."""
        sql = (
            "SELECT COALESCE(SUM(LENGTH(data)), 0) AS bytes FROM interactions "
            "WHERE session_id IN (SELECT value FROM json_each(?))"
        )
        with self._readable():
            ids = orjson.dumps([*session_ids]).decode()
            return int(self._connection.execute(sql, (ids,)).fetchone()["bytes"])

    def newest(self) -> tuple[float, str] | None:
        """Return the end and the id of the latest session that has ended and has calls here."""
        sql = (
            "SELECT ended_at, id FROM sessions WHERE content = 'stored' AND ended_at IS NOT NULL "
            "AND EXISTS (SELECT 1 FROM interactions WHERE session_id = sessions.id) "
            "ORDER BY ended_at DESC LIMIT 1"
        )
        with self._readable():
            row = self._connection.execute(sql).fetchone()
        return (row["ended_at"], row["id"]) if row is not None else None

    def sessions(self, wanted: ExportFilter) -> Iterator[StoredSession | DamagedSession]:
        """Iterate over the sessions of this moment that are not deleted, in order of creation."""
        values = asdict(wanted) | {"states": orjson.dumps(list(wanted.states)).decode()}
        with self._readable():
            (last,) = self._connection.execute("SELECT MAX(number) FROM sessions").fetchone()
        number = 0
        while True:
            with self._readable():
                self._connection.execute("BEGIN")
                try:
                    bounds = {"number": number, "last": last}
                    found = self._connection.execute(_NEXT, {**values, **bounds}).fetchone()
                    session = self._session(found) if found is not None else None
                finally:
                    self._connection.execute("ROLLBACK")
            if session is None:
                return
            number = found["number"]
            yield session

    def _session(self, found: sqlite3.Row) -> StoredSession | DamagedSession:
        try:
            row = session_row(found)
            if row.content != "stored":
                return StoredSession(found["number"], row, [], [])
            sql = (
                "SELECT interaction_id, name, value, by, at, text FROM rewards "
                "WHERE session_id = ? ORDER BY number"
            )
            rewards = [RewardRow(*each) for each in self._connection.execute(sql, (row.id,))]
            interactions = list(self._interactions(row.id))
            if found["recorded"] not in (None, len(interactions)):
                problem = f"{len(interactions)} of {found['recorded']} interactions are there"
                return DamagedSession(row.id, problem)
            return StoredSession(found["number"], row, rewards, interactions)
        except (ValueError, sqlite3.DatabaseError) as error:
            if isinstance(error, sqlite3.DatabaseError) and not is_damage(error):
                raise
            return DamagedSession(found["id"], str(error))

    def _interactions(self, session_id: str) -> Iterator[Interaction]:
        sql = (
            "SELECT id, data, checksum, reward FROM interactions WHERE session_id = ? "
            "ORDER BY number"
        )
        for id, data, checksum, reward in self._connection.execute(sql, (session_id,)):
            if zlib.crc32(data) != checksum:
                raise ValueError(f"interaction {id} does not match its checksum")
            interaction = unpack_interaction(data)
            interaction.reward = reward
            yield interaction

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StartupError(
                f"the journal {self._path} cannot be read ({error}): start the service, which "
                "saves what can be read of a damaged one"
            ) from error
