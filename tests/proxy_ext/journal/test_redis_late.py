"""Commands that arrive late, files that are behind or ahead, processes that wake."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import redis

from any_agent.errors import StoreUnavailable
from proxy_ext.journal import EraseContent, SQLiteJournal, open_journal
from tests.support.redis_journal import (
    Machine,
    elsewhere,
    ids,
    log_key,
    put,
    stop,
    until_asked,
    until_written,
)
from tests.support.redis_server import RedisServer
from tests.support.waiting import until


class Late:
    """A script of a log that does not arrive, until :meth:`arrive`."""

    def __init__(self, journal: SQLiteJournal, name: str) -> None:
        keeper: Any = journal._keeper
        self.log: Any = keeper.log
        self._name = name
        self._real = getattr(self.log, name)
        self._call: dict[str, Any] = {}
        setattr(self.log, name, self._keep)

    def _keep(self, **call: Any) -> Any:
        self._call = call
        raise redis.TimeoutError("no answer")

    @property
    def called(self) -> bool:
        return bool(self._call)

    def restore(self) -> None:
        setattr(self.log, self._name, self._real)
        self.log._silent_until = 0.0

    def arrive(self) -> None:
        self._real(**self._call)


async def test_a_late_retract(tmp_path: Path, server: RedisServer) -> None:
    journal = Machine(tmp_path, server.url, "a").open()
    await put(journal, "s1")
    journal._keeper._take()  # type: ignore[union-attr]
    append = Late(journal, "_append")
    with pytest.raises(StoreUnavailable):
        await put(journal, "unanswered")
    append.restore()
    retract = Late(journal, "_retract")
    with pytest.raises(StoreUnavailable):
        await put(journal, "unanswered, too")
    retract.restore()
    await put(journal, "s2")
    retract.arrive()
    await put(journal, "s3")
    append.arrive()
    stop(journal)
    assert await elsewhere(tmp_path, server.url) == ["s1", "s2", "s3"]


async def test_a_late_seed(tmp_path: Path, server: RedisServer) -> None:
    journal = Machine(tmp_path, server.url, "a").open()
    await put(journal, "s1")
    seed = Late(journal, "_seed")
    with server.client() as client:
        client.flushall()
    with pytest.raises(StoreUnavailable):
        await put(journal, "unanswered")
    await until(lambda: seed.called, "the seed")
    seed.restore()
    await until_written(journal, "s2")
    seed.arrive()
    await put(journal, "s3")
    stop(journal)
    assert await elsewhere(tmp_path, server.url) == ["s1", "s2", "s3"]


async def test_a_late_snapshot(tmp_path: Path, server: RedisServer) -> None:
    journal = Machine(tmp_path, server.url, "a").open()
    await put(journal, "s1")
    keeper: Any = journal._keeper
    snapshot = Late(journal, "_snapshot")
    with pytest.raises(redis.TimeoutError):
        keeper._take()
    snapshot.restore()
    await put(journal, "s2")
    keeper._take()
    snapshot.arrive()
    stop(journal)
    assert await elsewhere(tmp_path, server.url) == ["s1", "s2"]


class FailingOnce:
    """A connection of which one commit fails."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._fails = True

    def execute(self, sql: str, *values: Any) -> Any:
        if sql == "COMMIT" and self._fails:
            self._fails = False
            raise sqlite3.OperationalError("disk I/O error")
        return self._connection.execute(sql, *values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


@pytest.mark.parametrize("what", ["trim", "write"])
async def test_a_file_that_does_not_commit(what: str, tmp_path: Path, server: RedisServer) -> None:
    journal = Machine(tmp_path, server.url, "a").open()
    await put(journal, "s1", "s2")
    journal._writer.connection = FailingOnce(journal._writer.connection)  # type: ignore[assignment]
    with pytest.raises(StoreUnavailable):
        await (journal.trim() if what == "trim" else put(journal, "failed"))
    await put(journal, "s3")
    assert await ids(journal) == ["s1", "s2", "s3"]
    stop(journal)
    assert await elsewhere(tmp_path, server.url) == ["s1", "s2", "s3"]


async def test_without_redis_for_a_while(tmp_path: Path, server: RedisServer) -> None:
    machine = Machine(tmp_path, server.url, "a")
    journal = machine.open()
    await put(journal, "s1")
    await journal.close()
    alone = open_journal(machine.run.journal_url(0))
    await put(alone, "s2")
    await alone.close()
    journal = machine.open()
    await put(journal, "s3")
    stop(journal)
    assert await elsewhere(tmp_path, server.url) == ["s1", "s2", "s3"]


@pytest.mark.parametrize("state", ["older", "empty"])
async def test_a_file_after_a_loss_of_power(
    state: str, tmp_path: Path, server: RedisServer
) -> None:
    """It has not everything that the log's snapshot has, or nothing."""
    machine = Machine(tmp_path, server.url, "a")
    journal = machine.open()
    await put(journal, "s1")
    file, disk = machine.run.journal(0), tmp_path / "disk"
    disk.mkdir()
    for end in ("", "-wal"):
        shutil.copy(f"{file}{end}", disk / f"file{end}")
    await put(journal, "s2")
    journal._keeper._take()  # type: ignore[union-attr]
    await put(journal, "s3")
    stop(journal)
    await journal._reader.close()
    await journal._writer.close()
    for old in (file, Path(f"{file}-wal"), Path(f"{file}-shm")):
        await asyncio.to_thread(old.unlink, missing_ok=True)
    if state == "older":
        for end in ("", "-wal"):
            shutil.copy(disk / f"file{end}", f"{file}{end}")
    else:
        file.touch()
    again = await asyncio.to_thread(machine.open)
    assert await ids(again) == ["s1", "s2", "s3"]
    await again.close()


async def test_a_process_that_wakes_after_the_server_lost_everything(
    tmp_path: Path, server: RedisServer
) -> None:
    """A person let another machine begin anew: the first must not take the log back."""
    asleep = Machine(tmp_path, server.url, "a").open()
    await put(asleep, "s1")
    stop(asleep)
    with server.client() as client:
        client.flushall()
    (note,) = (tmp_path / "runs").rglob("*.log.json")
    note.unlink()
    journal = await asyncio.to_thread(Machine(tmp_path, server.url, "b").open)
    await put(journal, "s2")
    with pytest.raises(StoreUnavailable):
        await put(asleep, "late")
    assert asleep.stats.lost
    await put(journal, "s3")
    assert await ids(journal) == ["s2", "s3"]
    await journal.close()


async def test_erased_content_leaves_although_a_snapshot_failed(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy_ext.journal.log_keeper._SNAPSHOT_PAUSE", 0.0)
    journal = Machine(tmp_path, server.url, "a").open()
    await put(journal, "s1")
    snapshot = Late(journal, "_snapshot")
    await journal.commit(EraseContent(("s1",)))
    await until(lambda: snapshot.called, "the snapshot")
    snapshot.restore()
    key = log_key(server)
    await until_asked(server, lambda client: client.xlen(key) == 0)
    await journal.close()
