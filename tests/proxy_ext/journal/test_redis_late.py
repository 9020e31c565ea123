"""Commands that arrive late, files that are behind or ahead, processes that wake."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
import redis

from any_agent.errors import StoreUnavailable
from proxy_ext.journal import EraseContent, PutInteraction, log_keeper, redis_log
from proxy_ext.journal import redis_scripts as scripts
from tests.support.errors import fails_with
from tests.support.journal import FailingCommit, make_interaction
from tests.support.redis_journal import (
    Late,
    Machine,
    begun,
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


@pytest.fixture(autouse=True)
def tries_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_log, "RETRY_SECONDS", 0.0)


async def test_a_late_retract_undoes_nothing_newer(tmp_path: Path, server: RedisServer) -> None:
    journal = await begun(tmp_path, server.url, "s1")
    journal.keeper.take()  # type: ignore[union-attr]
    append = Late(journal, scripts.APPEND)
    with pytest.raises(StoreUnavailable):
        await put(journal, "unanswered")
    append.restore()
    retract = Late(journal, scripts.RETRACT)
    with pytest.raises(StoreUnavailable):
        await put(journal, "unanswered, too")
    retract.restore()
    await put(journal, "s2")
    retract.arrive()
    await put(journal, "s3")
    append.arrive()
    stop(journal)
    assert await elsewhere(tmp_path, server.url) == ["s1", "s2", "s3"]


async def test_a_late_seed_empties_no_newer_log(tmp_path: Path, server: RedisServer) -> None:
    journal = await begun(tmp_path, server.url, "s1")
    seed = Late(journal, scripts.SEED)
    server.flush()
    with pytest.raises(StoreUnavailable):
        await put(journal, "unanswered")
    await until(lambda: seed.called, "the seed")
    seed.restore()
    await until_written(journal, "s2")
    seed.arrive()
    await put(journal, "s3")
    stop(journal)
    assert await elsewhere(tmp_path, server.url) == ["s1", "s2", "s3"]


async def test_a_late_snapshot_replaces_no_newer_one(tmp_path: Path, server: RedisServer) -> None:
    journal = await begun(tmp_path, server.url, "s1")
    keeper: Any = journal.keeper
    snapshot = Late(journal, scripts.SNAPSHOT)
    with pytest.raises(redis.TimeoutError):
        keeper.take()
    snapshot.restore()
    await put(journal, "s2")
    keeper.take()
    snapshot.arrive()
    stop(journal)
    assert await elsewhere(tmp_path, server.url) == ["s1", "s2"]


@pytest.mark.parametrize("what", ["trim", "write"])
async def test_a_write_that_the_file_did_not_commit_is_not_in_the_log(
    what: str, tmp_path: Path, server: RedisServer
) -> None:
    journal = await begun(tmp_path, server.url, "s1", "s2")
    journal.writer.connection = FailingCommit(journal.writer.connection)  # type: ignore[assignment]
    with pytest.raises(StoreUnavailable):
        await (journal.trim() if what == "trim" else put(journal, "failed"))
    await put(journal, "s3")
    assert await ids(journal) == ["s1", "s2", "s3"]
    stop(journal)
    assert await elsewhere(tmp_path, server.url) == ["s1", "s2", "s3"]


@pytest.mark.parametrize("state", ["older", "empty"])
async def test_a_file_that_a_loss_of_power_set_back_is_made_again(
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
    journal.keeper.take()  # type: ignore[union-attr]
    await put(journal, "s3")
    stop(journal)
    await journal.reader.close()
    await journal.writer.close()
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


async def test_a_process_that_wakes_late_does_not_take_the_new_log_back(
    tmp_path: Path, server: RedisServer
) -> None:
    """A person let another machine begin anew: the first must not take the log back."""
    asleep = await begun(tmp_path, server.url, "s1")
    stop(asleep)
    server.flush()
    (note,) = (tmp_path / "runs").rglob("*.log.json")
    note.unlink()
    journal = await asyncio.to_thread(Machine(tmp_path, server.url, "b").open)
    await put(journal, "s2")
    with pytest.raises(StoreUnavailable):
        await put(asleep, "late")
    assert asleep.stats.lost
    with fails_with(StoreUnavailable, "another process"):
        await ids(asleep)
    await put(journal, "s3")
    assert await ids(journal) == ["s2", "s3"]
    await journal.close()


async def test_erased_content_leaves_the_log_although_a_snapshot_failed(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_keeper, "SNAPSHOT_PAUSE", 0.0)
    journal = await begun(tmp_path, server.url, "s1")
    await journal.commit(PutInteraction(make_interaction("i1", "s1")))
    key = log_key(server)
    await until_asked(server, lambda client: client.xlen(key) == 0)
    snapshot = Late(journal, scripts.SNAPSHOT)
    await journal.commit(EraseContent(("s1",)))
    await until(lambda: snapshot.called, "the snapshot")
    snapshot.restore()
    await until_asked(server, lambda client: client.xlen(key) == 0)
    await journal.close()
    (kept,) = (tmp_path / "runs").rglob("*.snapshot")
    assert b"i1" not in kept.read_bytes()
