"""The SQLite journal: writes share commits, and a store that fails says so."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from any_agent.errors import StoreBusy, StoreFull, StoreUnavailable
from any_agent.types import SessionState
from proxy_ext.journal import (
    EraseContent,
    MarkDelivered,
    PutInteraction,
    PutMeta,
    PutSession,
    SessionFilter,
    SetState,
    SQLiteJournal,
    sqlite,
    writer,
)
from tests.support.journal import FailingCommit, make_interaction, make_row

BEGIN = "BEGIN IMMEDIATE"


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[SQLiteJournal]:
    journal = SQLiteJournal(tmp_path / "j" / "rank-0.sqlite")
    yield journal
    await journal.close()


async def together(
    journal: SQLiteJournal, *writes: Coroutine[Any, Any, None]
) -> tuple[list[Any], list[str]]:
    """Queue writes while the journal's thread is held up; return how each ended, and the statements
    that SQLite ran."""
    begun, queued = threading.Event(), threading.Event()
    statements: list[str] = []

    def hold(_: sqlite3.Connection) -> None:
        begun.set()
        assert queued.wait(60)

    held = journal.writer.submit(writer.JournalJob(hold, writes=False))
    await asyncio.to_thread(begun.wait, 60)
    journal.writer.connection.set_trace_callback(statements.append)
    tasks = [asyncio.create_task(write) for write in writes]
    await asyncio.sleep(0)
    queued.set()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    await held
    return ended, statements


async def test_only_few_marks_of_delivery_in_a_row_are_acknowledged_unsynced(
    journal: SQLiteJournal,
) -> None:
    """A log that lost more than these is known to be damaged."""
    connection = journal.writer.connection
    assert connection.execute("PRAGMA synchronous").fetchone()[0] == 2  # FULL
    modes, synced = ["FULL"], []

    def watch(statement: str) -> None:
        if "synchronous" in statement:
            modes.append(statement.split()[-1])
        if statement == "COMMIT":
            synced.append(modes[-1] == "FULL")

    mark = MarkDelivered(("i",))
    connection.set_trace_callback(watch)
    await journal.commit(PutSession(make_row("s")), PutInteraction(make_interaction("i", "s")))
    for _ in range(6):
        await journal.commit(mark)
    # Together with another write it is as durable as that one.
    await journal.commit(mark, PutMeta("k", 1))
    assert synced == [True, False, False, False, True, False, False, True]
    connection.set_trace_callback(None)
    _, ran = await together(journal, journal.commit(mark), journal.commit(PutMeta("k", 2)))
    assert ran.count(BEGIN) == 1 and "PRAGMA synchronous = NORMAL" not in ran
    assert connection.execute("PRAGMA synchronous").fetchone()[0] == 2


async def test_erased_content_that_somebody_reads_leaves_with_the_reader(
    journal: SQLiteJournal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves the log when the reader does; until then nothing waits for long."""
    monkeypatch.setattr(writer, "WIPE_INTERVAL", 0.0)
    interaction = make_interaction("i", "s")
    interaction.message_delta = [{"role": "user", "content": "canary" * 3000}]
    await journal.commit(PutSession(make_row("s")), PutInteraction(interaction))
    reader = sqlite3.connect(tmp_path / "j" / "rank-0.sqlite", isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT COUNT(*) FROM interactions").fetchall()
    began = time.monotonic()
    await journal.commit(EraseContent(("s",)))
    assert time.monotonic() - began < 4
    assert on_disk(tmp_path, b"canary")
    reader.close()
    await journal.commit(PutMeta("a", 1))
    assert not on_disk(tmp_path, b"canary")


def on_disk(folder: Path, text: bytes) -> bool:
    return any(text in file.read_bytes() for file in folder.rglob("*") if file.is_file())


async def test_writes_that_queue_share_a_commit_and_a_bad_one_harms_only_itself(
    journal: SQLiteJournal,
) -> None:
    """It costs one more transaction."""
    good = [journal.commit(PutMeta(f"k{k}", k)) for k in range(200)]
    results, ran = await together(journal, *good)
    assert (results, ran.count(BEGIN)) == ([None] * 200, 1)
    bad = SetState(("s",), SessionState.TRAINED, reason="\ud800")
    writes = [journal.commit(PutMeta(f"k{k}", -k)) for k in range(30)]
    writes.insert(20, journal.commit(PutMeta("half", 1), bad))
    results, ran = await together(journal, *writes)
    assert isinstance(results.pop(20), StoreUnavailable)
    assert (results, ran.count(BEGIN)) == ([None] * 30, 2)
    assert [await journal.meta(f"k{k}") for k in range(31)] == [*(-k for k in range(30)), 30]
    assert await journal.meta("half") is None


async def test_a_foreign_lock_fails_a_batch_at_once(journal: SQLiteJournal, tmp_path: Path) -> None:
    """One busy time-out, not one for each write."""
    journal.writer.connection.execute("PRAGMA busy_timeout = 20")
    other = sqlite3.connect(tmp_path / "j" / "rank-0.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    writes = [journal.commit(PutMeta(f"k{k}", k)) for k in range(50)]
    results, ran = await together(journal, *writes)
    assert [type(result) for result in results] == [StoreUnavailable] * 50
    assert ran.count(BEGIN) == 1
    other.close()
    await journal.commit(PutMeta("k0", "after"))
    assert [await journal.meta(key) for key in ("k0", "k1")] == ["after", None]


async def test_writes_beyond_the_queue_are_refused_and_not_begun(
    journal: SQLiteJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "MAX_QUEUE", 2)
    writes = [journal.commit(PutMeta(f"k{k}", k)) for k in range(10)]
    results, _ = await together(journal, *writes)
    assert [type(result) for result in results] == [type(None)] * 2 + [StoreBusy] * 8
    assert [await journal.meta(f"k{k}") for k in range(10)] == [0, 1] + [None] * 8


async def test_a_lost_connection_is_told_to_everybody(tmp_path: Path) -> None:
    journal = SQLiteJournal(tmp_path / "j.sqlite")
    await journal.commit(PutMeta("a", 1))
    journal.writer.connection.close()
    for _ in range(2):
        async with asyncio.timeout(60):
            results = await asyncio.gather(
                journal.commit(PutMeta("a", 2)),
                journal.commit(PutMeta("b", 2)),
                journal.meta("a"),
                return_exceptions=True,
            )
        assert [type(r) for r in results] == [StoreUnavailable] * 3
    await journal.close()


async def test_a_full_disk_refuses_writes_until_there_is_space(journal: SQLiteJournal) -> None:
    """As SQLite reports it; what was acknowledged before stays readable."""
    await journal.commit(PutMeta("a", 1))
    execute = journal.writer.connection.execute
    (pages,) = execute("PRAGMA page_count").fetchone()
    execute(f"PRAGMA max_page_count = {pages + 1}")
    for _ in range(3):
        with pytest.raises(StoreFull) as refused:
            await journal.commit(PutMeta("big", "x" * 100_000), PutMeta("small", 1))
    assert (refused.value.status, refused.value.code) == (507, "store_full")
    assert int(refused.value.headers()["Retry-After"]) >= 1
    assert journal.stats.full
    assert await journal.meta("a") == 1
    assert await journal.meta("small") is None
    execute("PRAGMA max_page_count = 100000")
    await journal.commit(PutMeta("big", "x" * 100_000))
    assert not journal.stats.full


async def test_a_disk_that_is_gone_ends_no_writer(
    journal: SQLiteJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits is told, also if not even the free space can be asked for."""

    def gone(_: Path) -> None:
        raise OSError(5, "Input/output error")

    def fails(_: sqlite3.Connection) -> None:
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR_WRITE
        raise error

    monkeypatch.setattr(os, "statvfs", gone)
    async with asyncio.timeout(60):
        with pytest.raises(StoreUnavailable):
            await journal.writer.submit(writer.JournalJob(fails, writes=True))
        await journal.commit(PutMeta("a", 1))


async def test_a_commit_that_fails_says_that_it_is_not_sure(journal: SQLiteJournal) -> None:
    journal.writer.connection = FailingCommit(journal.writer.connection)  # type: ignore[assignment]
    write, read = journal.commit(PutMeta("a", 1)), journal.meta("a")
    results = await asyncio.gather(write, read, return_exceptions=True)
    assert type(results[0]) is StoreUnavailable
    assert "check it before you try again" in str(results[0])
    # A read does not fail with the writes beside it.
    assert results[1] is None
    await journal.commit(PutMeta("a", 2))
    assert await journal.meta("a") == 2


ENDED = (
    ("trained-1", SessionState.TRAINED, 1),
    ("trained-5", SessionState.TRAINED, 5),
    ("trained-?", SessionState.TRAINED, None),
    ("rejected-1", SessionState.REJECTED, 1),
    ("rejected-5", SessionState.REJECTED, 5),
    ("rejected-?", SessionState.REJECTED, None),
    ("evaluated", SessionState.EVALUATED, None),
    ("expired", SessionState.EXPIRED, None),
    ("aborted", SessionState.ABORTED, None),
)
NEVER_WANTED = ["rejected-?", "evaluated", "expired", "aborted"]


async def ended(journal: SQLiteJournal, oldest_step: int | None, *, limit: int = 99) -> list[str]:
    found = await journal.ended(before=100.0, oldest_step=oldest_step, limit=limit)
    return [each.row.id for each in found]


async def test_sessions_that_a_resume_may_want_are_kept(journal: SQLiteJournal) -> None:
    rows = [make_row(id, state=state, step=step, ended_at=50.0) for id, state, step in ENDED]
    late = [replace(row, id=f"late-{row.id}", ended_at=100.0) for row in rows]
    live = [
        make_row(state, state=state)
        for state in SessionState
        if state not in {row.state for row in rows}
    ]
    gone = [replace(rows[-1], id=content, content=content) for content in ("archived", "deleted")]
    await journal.commit(*map(PutSession, [*rows, *late, *live, *gone]))
    assert await ended(journal, None) == NEVER_WANTED
    assert await ended(journal, 0) == NEVER_WANTED
    assert await ended(journal, 4) == ["trained-1", "rejected-1", *NEVER_WANTED]
    assert await ended(journal, 5) == [id for id, *_ in ENDED if id != "trained-?"]
    assert await ended(journal, 5, limit=2) == ["trained-1", "trained-5"]
    await journal.commit(PutSession(replace(rows[-1], id="first", ended_at=49.0)))
    assert await ended(journal, 5, limit=2) == ["trained-1", "first"]


async def test_a_page_looks_at_so_many_sessions_however_rare_the_wanted_ones_are(
    journal: SQLiteJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "MAX_SCANNED", 4)
    for k in range(10):
        await journal.commit(PutSession(make_row(f"s{k}", task_id=f"t{k % 2}")))
    out: list[str] = []
    before = None
    while True:
        page = await journal.page(SessionFilter(task_id="t0"), before=before, limit=9)
        out += [each.row.id for each in page.rows]
        before = page.before
        if before is None:
            break
    assert out == ["s8", "s6", "s4", "s2", "s0"]
    empty = await journal.page(SessionFilter(state=SessionState.TRAINED), before=None, limit=9)
    assert (empty.rows, empty.before) == ([], 7)


async def test_a_page_by_reward_looks_at_fewer_sessions_as_it_reads_their_calls(
    journal: SQLiteJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "MAX_SUMMED", 2)
    for k in range(5):
        await journal.commit(PutSession(make_row(f"s{k}", final_reward=float(k))))
    for wanted in (SessionFilter(min_reward=9.0), SessionFilter(max_reward=-1.0)):
        page = await journal.page(wanted, before=None, limit=9)
        assert (page.rows, page.before) == ([], 4)
