"""Sessions of one rank in the order of creation, from its journal and its archives, each once.

The journal is read without writing to it, a session at a time, each in a transaction of its own: a
service that runs is not held up, and what is moved to an archive meanwhile is found there.
"""

from __future__ import annotations

import heapq
import sqlite3
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from any_agent.errors import StartupError
from any_agent.record import unpack_interaction
from any_agent.types import Interaction
from proxy_ext.archive.files import ArchiveFile, ArchiveFolder, first_session, list_archives
from proxy_ext.archive.records import read_record, record_line
from proxy_ext.journal import RewardRow, schema
from proxy_ext.journal.sqlite import session_row
from proxy_ext.journal.writer import is_damage

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ExportFilter:
    """Which sessions; None or empty: any."""

    states: Sequence[str] = ()
    task_id: str | None = None
    since: float | None = None
    """Seconds since the epoch."""

    def takes(self, state: str, task_id: str | None, created_at: float) -> bool:
        return (
            (not self.states or state in self.states)
            and (self.task_id is None or task_id == self.task_id)
            and (self.since is None or created_at >= self.since)
        )


class SessionRecord(NamedTuple):
    """One session."""

    created_at: float
    rank: int
    session_id: str
    line: bytes
    """As :mod:`proxy_ext.archive.records` has it."""
    archived: bool


def read_rank(
    journal: Path, folder: Path, rank: int, wanted: ExportFilter, report: Report
) -> Iterator[SessionRecord]:
    """A rank's sessions; ``report`` is told of what is damaged or missing.

    Raises:
        StartupError: the journal cannot be read at all.
    """
    if not journal.exists():
        alone = ArchiveFolder(lambda: list_archives(folder, rank), report)
        yield from _archived_alone(alone, rank, wanted, report)
        return
    try:
        with closing(_open(journal)) as connection:
            foreign = _foreign(connection, folder, rank)
            earlier = _archived_alone(ArchiveFolder(lambda: foreign, report), rank, wanted, report)

            def own() -> list[ArchiveFile]:
                return [file for file in list_archives(folder, rank) if file not in foreign]

            mine = _read(connection, ArchiveFolder(own, report), rank, wanted, report)
            yield from heapq.merge(earlier, mine, key=lambda found: found.created_at)
    except sqlite3.Error as error:
        raise StartupError(
            f"the journal {journal} cannot be read ({error}): start the service, which saves what "
            "can be read of a damaged one"
        ) from error


def _foreign(connection: sqlite3.Connection, folder: Path, rank: int) -> list[ArchiveFile]:
    """The files of an earlier journal, which is not there any more."""
    out = []
    for file in list_archives(folder, rank):
        # What is damaged is reported when it is read for its content.
        first = first_session(file, lambda _: None)
        sql = "SELECT 1 FROM sessions WHERE id = ?"
        if first is not None and connection.execute(sql, (first,)).fetchone() is None:
            out.append(file)
    return out


def _archived_alone(
    archives: ArchiveFolder, rank: int, wanted: ExportFilter, report: Report
) -> Iterator[SessionRecord]:
    """Sessions whose journal is not there any more."""
    for line in archives.all():
        try:
            session = read_record(line).session
            found = SessionRecord(session["created_at"], rank, session["id"], line, archived=True)
            if wanted.takes(session["state"], session["task_id"], session["created_at"]):
                yield found
        except (ValueError, KeyError) as error:
            report(f"a line of rank {rank}'s archives is damaged: {error}")


def _open(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=30)
    connection.isolation_level = None
    connection.row_factory = sqlite3.Row
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version != schema.VERSION:
        connection.close()
        raise StartupError(
            f"the journal {path} is of version {version}, this reads {schema.VERSION}: start the "
            "service once with this version, which takes older ones over"
        )
    return connection


def _read(
    connection: sqlite3.Connection,
    archives: ArchiveFolder,
    rank: int,
    wanted: ExportFilter,
    report: Report,
) -> Iterator[SessionRecord]:
    (last,) = connection.execute("SELECT MAX(number) FROM sessions").fetchone()
    number = 0
    sql, values = _query(wanted)
    while True:
        connection.execute("BEGIN")
        try:
            found = connection.execute(sql, {**values, "number": number, "last": last}).fetchone()
            if found is None:
                return
            number = found["number"]
            try:
                row = session_row(found)
                line = _line(connection, found) if row.content == "stored" else None
            except (ValueError, sqlite3.DatabaseError) as error:
                if isinstance(error, sqlite3.DatabaseError) and not is_damage(error):
                    raise
                report(f"session {found['id']} is damaged in the journal: {error}")
                continue
        finally:
            connection.execute("ROLLBACK")
        archived = line is None
        if line is None:
            line = archives.find(number, row.id)
            if line is None:
                if _deleted(connection, number):
                    continue
                report(f"session {row.id} is in no archive that can be read")
                continue
        yield SessionRecord(row.created_at, rank, row.id, line, archived)


def _deleted(connection: sqlite3.Connection, number: int) -> bool:
    """Whether it is by now."""
    sql = "SELECT content FROM sessions WHERE number = ?"
    row = connection.execute(sql, (number,)).fetchone()
    return row is not None and row["content"] == "deleted"


def _query(wanted: ExportFilter) -> tuple[str, dict[str, object]]:
    conditions = ["number > :number", "number <= :last", "content <> 'deleted'"]
    values: dict[str, object] = {}
    if wanted.states:
        marks = [f":state{k}" for k in range(len(wanted.states))]
        conditions.append(f"state IN ({', '.join(marks)})")
        values |= {mark[1:]: state for mark, state in zip(marks, wanted.states, strict=True)}
    if wanted.task_id is not None:
        conditions.append("task_id = :task_id")
        values["task_id"] = wanted.task_id
    if wanted.since is not None:
        conditions.append("created_at >= :since")
        values["since"] = wanted.since
    where = " AND ".join(conditions)
    # By their numbers: through any other index each step would look at all that is left.
    sql = f"SELECT * FROM sessions NOT INDEXED WHERE {where} ORDER BY number LIMIT 1"
    return sql, values


def _line(connection: sqlite3.Connection, found: sqlite3.Row) -> bytes:
    """A stored session; ValueError if it is damaged."""
    row = session_row(found)
    rewards = connection.execute(
        "SELECT interaction_id, name, value, by, at FROM rewards WHERE session_id = ? "
        "ORDER BY number",
        (row.id,),
    )
    interactions = list(_interactions(connection, row.id))
    if found["recorded"] not in (None, len(interactions)):
        raise ValueError(f"{len(interactions)} of {found['recorded']} interactions are there")
    return record_line(
        found["number"], row, [RewardRow(*reward) for reward in rewards], interactions
    )


def _interactions(connection: sqlite3.Connection, session_id: str) -> Iterator[Interaction]:
    sql = "SELECT id, data, checksum, reward FROM interactions WHERE session_id = ? ORDER BY number"
    for id, data, checksum, reward in connection.execute(sql, (session_id,)):
        if zlib.crc32(data) != checksum:
            raise ValueError(f"interaction {id} is not what was written")
        interaction = unpack_interaction(data)
        interaction.reward = reward
        yield interaction
