"""The file of a journal with its log in Redis, which is not synced: when it is trusted, and when
made again."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from any_agent.errors import StartupError
from any_agent.runtime import boot_clock
from proxy_ext.journal import files, open_journal, statements
from tests.support.errors import fails_with
from tests.support.redis_journal import Machine, begun, elsewhere, ids, put, stop
from tests.support.redis_server import RedisServer


@pytest.fixture
def another_boot(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Boot the machine anew, for what a journal can see of it."""
    boots = itertools.count()

    def anew() -> None:
        now = f"boot-{next(boots)}"
        monkeypatch.setattr(boot_clock, "boot_id", lambda: now)

    return anew


def changed(file: Path, sql: str, *values: bytes) -> None:
    """Change a file behind its journal's back."""
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        connection.execute(sql, values)


async def test_after_a_loss_of_power_the_file_is_made_again(
    tmp_path: Path, shared_server: RedisServer, another_boot: Callable[[], None]
) -> None:
    """It was not synced: anything may be on the disk."""
    machine = Machine(tmp_path, shared_server.url, "a")
    journal = await begun(tmp_path, shared_server.url, "s1", "s2")
    file = journal.path
    (mode,) = journal.writer.connection.execute("PRAGMA synchronous").fetchone()
    assert mode == 0
    stop(journal)
    changed(file, "UPDATE sessions SET id = 'lost' WHERE id = 's1'")
    journal = await asyncio.to_thread(machine.open)
    assert await ids(journal) == ["lost", "s2"]  # of the same boot it is taken as it is
    for nonsense in (None, b"{", b"1"):
        stop(journal)
        if nonsense is not None:  # nor does it matter what its own notes say
            changed(file, "UPDATE meta SET value = ? WHERE key = 'log'", nonsense)
        another_boot()
        journal = await asyncio.to_thread(machine.open)
        assert await ids(journal) == ["s1", "s2"]
    await journal.close()


async def test_without_the_id_of_a_boot_no_unsynced_file_is_trusted(
    tmp_path: Path, shared_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boot_clock, "boot_id", lambda: "")
    machine = Machine(tmp_path, shared_server.url, "a")
    journal = await begun(tmp_path, shared_server.url, "s1")
    stop(journal)
    assert not files.is_whole(journal.path)
    journal = await asyncio.to_thread(machine.open)
    assert await ids(journal) == ["s1"]
    await journal.close()
    assert files.is_whole(journal.path)


async def test_a_file_that_is_read_meanwhile_is_synced(
    tmp_path: Path, shared_server: RedisServer
) -> None:
    """The note that it is not cannot be written then."""
    machine = Machine(tmp_path, shared_server.url, "a")
    journal = await begun(tmp_path, shared_server.url, "s1")
    stop(journal)
    with closing(sqlite3.connect(journal.path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT COUNT(*) FROM sessions").fetchone()
        journal = await asyncio.to_thread(machine.open)
        (mode,) = journal.writer.connection.execute("PRAGMA synchronous").fetchone()
        assert mode == 1
    await journal.close()


async def test_after_a_normal_end_another_boot_changes_nothing(
    tmp_path: Path, server: RedisServer, another_boot: Callable[[], None]
) -> None:
    machine = Machine(tmp_path, server.url, "a")
    journal = await begun(tmp_path, server.url, "s1")
    await journal.close()
    changed(journal.path, "UPDATE sessions SET id = 'kept' WHERE id = 's1'")
    another_boot()
    journal = machine.open()
    assert await ids(journal) == ["kept"]
    await journal.close()
    # Nor what it acknowledged without Redis, by one or more starts.
    for name in ("alone", "again"):
        journal = open_journal(machine.run.journal_url(0))
        await put(journal, name)
        await journal.close()
    another_boot()
    journal = machine.open()
    assert await ids(journal) == ["kept", "alone", "again"]
    stop(journal)
    assert await elsewhere(tmp_path, server.url) == ["kept", "alone", "again"]


async def test_a_late_end_does_not_say_that_anothers_work_is_synced(
    tmp_path: Path, shared_server: RedisServer
) -> None:
    machine = Machine(tmp_path, shared_server.url, "a")
    first = machine.open()
    stop(first)  # it does nothing for a lease
    second = await asyncio.to_thread(machine.open)
    await first.close()
    with closing(sqlite3.connect(second.path)) as connection:
        assert statements.unsynced_by(connection) == (boot_clock.boot_id(), second.stats.claim)
    await second.close()
    assert files.is_whole(second.path)
    with closing(sqlite3.connect(second.path)) as connection:
        assert statements.unsynced_by(connection) is None


async def test_an_unsynced_file_does_not_begin_a_lost_log_anew(
    tmp_path: Path, server: RedisServer, another_boot: Callable[[], None]
) -> None:
    """Refuse to begin with a file that nobody has whole."""
    machine = Machine(tmp_path, server.url, "a")
    stop(await begun(tmp_path, server.url, "s1"))
    server.flush()
    another_boot()
    with fails_with(StartupError, "synced"):
        machine.open()
    (note,) = (tmp_path / "runs").rglob("*.log.json")
    note.unlink()
    journal = machine.open()
    assert await ids(journal) == ["s1"]
    await journal.close()


async def test_an_unsynced_file_used_without_its_log_says_so(
    tmp_path: Path,
    server: RedisServer,
    another_boot: Callable[[], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    machine = Machine(tmp_path, server.url, "a")
    for boots in (False, True):
        journal = await asyncio.to_thread(machine.open)
        await put(journal, f"s{boots}")
        stop(journal)
        if boots:
            another_boot()
        journal = open_journal(machine.run.journal_url(0))
        assert ("commits may be missing" in caplog.text) == boots
        await journal.close()
        assert files.is_whole(machine.run.journal(0))
