"""The SQLite journal: what was acknowledged is there, and a store that fails says so."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from any_agent.errors import StoreBusy, StoreFull, StoreUnavailable
from any_agent.record import pack_interaction
from any_agent.types import SessionState
from proxy_ext.journal import (
    AnswerRow,
    DropAnswers,
    EraseContent,
    MarkDelivered,
    PutAnswer,
    PutInteraction,
    PutMeta,
    PutSession,
    RequestMark,
    RewardRow,
    SessionRow,
    SetAwaiting,
    SetReward,
    SetState,
    SQLiteJournal,
    Statement,
    StoredRequest,
    writer,
)
from tests.support.journal import make_interaction, make_row
from tests.support.journal_writer import STEPS

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[SQLiteJournal]:
    journal = SQLiteJournal(tmp_path / "j" / "rank-0.sqlite")
    yield journal
    await journal.close()


def finalize(session_id: str, reward: float) -> tuple[Statement, ...]:
    """What is written when a session ends with its final reward."""
    return (
        SetReward(session_id, None, None, reward, "me", at=1.0, combined=reward),
        SetState((session_id,), SessionState.FINALIZED),
    )


async def test_what_is_committed_is_read_back(journal: SQLiteJournal, tmp_path: Path) -> None:
    first = make_row("s1", group_id="g", group_size=2, task_id="t", created_at=1.0)
    second = make_row("s2", group_id="g", group_size=2, mode="eval", created_at=0.5)
    parent = make_interaction("i1", "s1")
    child = make_interaction("i2", "s1", parent_id="i1")
    await journal.commit(PutSession(first), PutSession(second))
    await journal.commit(PutInteraction(parent, b"key"), PutInteraction(child))
    await journal.commit(
        SetReward("s1", "i2", None, -1.5, "me", at=3.0, combined=-1.5), PutMeta("run", {"step": 3})
    )
    assert await journal.session("s1") == first
    assert await journal.session("nothing") is None
    assert await journal.sessions([SessionState.OPEN]) == [first, second]
    assert await journal.sessions([SessionState.TRAINED]) == []
    assert await journal.session_of_lane("lane-s2") == second
    assert await journal.group("g") == [first, second]
    assert await journal.counts() == {("train", "open"): 1, ("eval", "open"): 1}
    assert await journal.meta("run") == {"step": 3}
    assert await journal.meta("none") is None
    stored = await journal.interactions("s1")
    assert [(i.interaction.id, i.interaction.reward, i.key) for i in stored] == [
        ("i1", None, b"key"),
        ("i2", -1.5, None),
    ]
    assert pack_interaction(stored[0].interaction) == pack_interaction(parent)
    await journal.commit(SetState(("s1", "s2"), SessionState.LEASED, "why", "owner"))
    row = await journal.session("s1")
    assert row is not None
    assert (row.state, row.reason, row.owner) == (SessionState.LEASED, "why", "owner")
    # Put again: replaced, at its old place.
    parent.untrainable_reason = "undelivered"
    await journal.commit(PutInteraction(parent))
    await journal.close()
    with pytest.raises(StoreBusy):
        await journal.commit(PutMeta("x", 1))
    again = SQLiteJournal(tmp_path / "j" / "rank-0.sqlite")
    stored = await again.interactions("s1")
    assert [(i.interaction.untrainable_reason, i.key) for i in stored] == [
        ("undelivered", b"key"),
        (None, None),
    ]
    await again.close()


async def test_a_session_that_is_there_is_not_overwritten(journal: SQLiteJournal) -> None:
    first = make_row("s1", metadata={"whose": "first"})
    await journal.commit(PutSession(first))
    with pytest.raises(StoreUnavailable):
        await journal.commit(PutSession(make_row("s1", metadata={"whose": "another's"})))
    assert await journal.session("s1") == first
    await journal.commit(*finalize("s1", 0.5))
    final = replace(first, state=SessionState.FINALIZED, final_reward=0.5)
    assert await journal.session("s1") == final


async def test_rewards_are_a_history(journal: SQLiteJournal) -> None:
    await journal.commit(PutSession(make_row("s1")), PutInteraction(make_interaction("i1", "s1")))
    history = [
        SetReward("s1", "i1", "correct", 1.0, "session", 1.5, combined=1.0),
        SetReward("s1", "i1", "format", 0.5, "session", 2.5, combined=1.25),
        SetReward("s1", None, None, -2.0, "admin", 3.5, combined=-2.0),
    ]
    for statement in history:
        await journal.commit(statement)
    assert await journal.rewards("s1") == [
        RewardRow(s.interaction_id, s.name, s.value, s.by, s.at) for s in history
    ]
    assert [r.at for r in await journal.rewards("s1", last=2)] == [2.5, 3.5]
    (stored,) = await journal.interactions("s1")
    row = await journal.session("s1")
    assert row is not None
    assert (stored.interaction.reward, row.final_reward) == (1.25, -2.0)


async def test_what_a_reward_is_made_of(journal: SQLiteJournal) -> None:
    await journal.commit(PutSession(make_row("s1")), PutInteraction(make_interaction("i1", "s1")))
    for of, name, value in (
        ("i1", "correct", 1.0),
        ("i1", None, 5.0),
        (None, "correct", 7.0),
        ("i1", "correct", 0.0),
        ("i1", None, -5.0),
    ):
        await journal.commit(SetReward("s1", of, name, value, "session", 1.0, combined=0.0))
    assert await journal.reward_parts("s1", "i1") == ({"correct": 0.0, None: -5.0}, 5)
    assert await journal.reward_parts("s1", None) == ({"correct": 7.0}, 5)
    assert await journal.reward_parts("s1", "i2") == ({}, 5)
    assert await journal.reward_parts("s2", None) == ({}, 0)


async def test_a_requests_mark_and_delivery_are_kept(journal: SQLiteJournal) -> None:
    mark = RequestMark(b"hash", 1)
    await journal.commit(
        PutInteraction(make_interaction("i1", "s1"), b"key", mark),
        PutInteraction(make_interaction("i2", "s1")),
    )
    assert await journal.requests("s1") == [StoredRequest("i1", mark, delivered=False)]
    await journal.commit(MarkDelivered(("i1",)))
    # Put again without them: key, mark and delivery stay.
    await journal.commit(PutInteraction(make_interaction("i1", "s1")))
    assert await journal.requests("s1") == [StoredRequest("i1", mark, delivered=True)]
    assert [i.key for i in await journal.interactions("s1")] == [b"key", None]


async def test_what_is_acknowledged_is_synced_from_the_first_commit_on(
    journal: SQLiteJournal,
) -> None:
    """SQLite syncs each commit with FULL, which is 2, and not with OFF or NORMAL, 0 or 1."""
    thread = journal._writer
    commit, modes = thread._commit, []

    def watched(jobs: list[writer.JournalJob], *, lazy: bool) -> None:
        modes.append(thread.connection.execute("PRAGMA synchronous").fetchone()[0])
        commit(jobs, lazy=lazy)

    thread._commit = watched  # type: ignore[assignment,method-assign]
    await journal.commit(PutSession(make_row("s")), PutInteraction(make_interaction("i", "s")))
    await journal.commit(MarkDelivered(("i",)))
    await journal.commit(MarkDelivered(("i",)), PutMeta("k", 1))
    assert modes == [2, 1, 2]
    # The thread is held up until two writes have queued, which then share a transaction.
    begun, queued = threading.Event(), threading.Event()

    def hold(_: sqlite3.Connection) -> None:
        begun.set()
        queued.wait(60)

    held = thread.submit(writer.JournalJob(hold, writes=False))
    await asyncio.to_thread(begun.wait, 60)
    both = asyncio.gather(journal.commit(MarkDelivered(("i",))), journal.commit(PutMeta("k", 2)))
    await asyncio.sleep(0)
    queued.set()
    await asyncio.gather(held, both)
    assert modes == [2, 1, 2, 2]


async def test_a_mark_of_delivery_alone_waits_for_no_disk(journal: SQLiteJournal) -> None:
    connection = journal._writer.connection
    statements: list[str] = []
    connection.set_trace_callback(statements.append)

    def how() -> list[str]:
        """How what was written since was synced."""
        return [s.split()[-1] for s in statements if "synchronous" in s]

    await journal.commit(PutSession(make_row("s")), PutInteraction(make_interaction("i", "s")))
    assert how() == []
    await journal.commit(MarkDelivered(("i",)))
    assert how() == ["NORMAL", "FULL"]
    statements.clear()
    # With another write it is as durable as that one.
    await asyncio.gather(journal.commit(MarkDelivered(("i",))), journal.commit(PutMeta("k", 1)))
    await journal.commit(MarkDelivered(("i",)), PutMeta("k", 2))
    assert how() in ([], ["NORMAL", "FULL"])
    assert connection.execute("PRAGMA synchronous").fetchone()[0] == 2


async def test_few_commits_in_a_row_are_left_unsynced(
    journal: SQLiteJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a log which lost more than these is known to be damaged."""
    writer, synced = journal._writer, []
    transact = writer._transact

    def watched(jobs: list) -> list:  # type: ignore[type-arg]
        results = transact(jobs)
        synced.append(writer._unsynced == 0)
        return results

    monkeypatch.setattr(writer, "_transact", watched)
    for _ in range(6):
        await journal.commit(MarkDelivered(("i1",)))
    await journal.commit(PutMeta("a", 1))
    assert synced == [False, False, False, True, False, False, True]
    (mode,) = writer.connection.execute("PRAGMA synchronous").fetchone()
    assert mode == 2


async def test_answers_are_kept_once_and_dropped_by_age(journal: SQLiteJournal) -> None:
    first = PutAnswer("admin", "k", b"hash", 200, b"{}", 10.0)
    await journal.commit(first, PutMeta("effect", 1))
    with pytest.raises(StoreUnavailable):
        await journal.commit(replace(first, body=b"other"), PutMeta("effect", 2))
    assert await journal.meta("effect") == 1
    assert await journal.answer("admin", "k") == AnswerRow("admin", "k", b"hash", 200, b"{}", 10.0)
    assert await journal.answer("other", "k") is None
    await journal.commit(DropAnswers(before=10.0))
    assert await journal.answer("admin", "k") is not None
    await journal.commit(DropAnswers(before=10.5))
    assert await journal.answer("admin", "k") is None


async def test_each_state_of_a_session_is_read_back(journal: SQLiteJournal) -> None:
    first = make_row(
        "s1", tenant="t", opened_by="tenant t (key 1)", pinned_version=3, clock="boot 12.5"
    )
    await journal.commit(PutSession(first), SetAwaiting("s1", until=50.0))
    ((state, until),) = journal._writer.connection.execute(
        "SELECT state, awaits_until FROM sessions"
    )
    assert (state, until) == ("awaiting_reward", 50.0)
    await journal.commit(*finalize("s1", 0.5))
    final = replace(first, state=SessionState.FINALIZED, final_reward=0.5)
    assert await journal.session("s1") == final
    await journal.commit(SetState(("s1",), SessionState.TRAINED, step=7, at=60.0))
    trained = replace(final, state=SessionState.TRAINED, step=7, ended_at=60.0)
    assert await journal.session("s1") == trained
    await journal.commit(SetState(("s1",), SessionState.LEASED, owner="o"))
    assert await journal.session("s1") == replace(final, state=SessionState.LEASED, owner="o")


async def test_erased_content_is_nowhere_on_disk(journal: SQLiteJournal, tmp_path: Path) -> None:
    for k in ("1", "2"):
        interaction = make_interaction(f"i{k}", f"s{k}")
        interaction.message_delta = [{"role": "user", "content": f"canary-{k}" * 3000}]
        row = make_row(f"s{k}", metadata={"of": f"canary-{k}"})
        await journal.commit(PutSession(row), PutInteraction(interaction))
    await journal.commit(SetReward("s1", None, None, 1.0, "me", 1.0, combined=1.0))
    assert on_disk(tmp_path, b"canary-1")
    await journal.commit(EraseContent(("s1",)))
    # Out of the file's free pages and of its log, too.
    assert not on_disk(tmp_path, b"canary-1")
    assert on_disk(tmp_path, b"canary-2")
    erased = await journal.session("s1")
    assert erased is not None
    assert (erased.content, erased.metadata, erased.final_reward) == ("deleted", {}, 1.0)
    assert await journal.interactions("s1") == []
    assert len(await journal.rewards("s1")) == 1
    assert len(await journal.interactions("s2")) == 1


async def test_erased_content_that_somebody_reads(
    journal: SQLiteJournal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves the log when the reader does; until then nothing waits for long."""
    monkeypatch.setattr(writer, "_WIPE_INTERVAL", 0.0)
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


async def test_what_there_is_of_names(journal: SQLiteJournal) -> None:
    assert await journal.last_session("ses") is None
    rows = [("ses-a0", None), ("ses-a9", "g"), ("ses-b0", "g"), ("ses-b1", "h"), ("set", None)]
    await journal.commit(*(PutSession(make_row(id, group_id=group)) for id, group in rows))
    assert await journal.last_session("ses-a") == "ses-a9"
    assert await journal.last_session("ses-") == "ses-b1"
    assert sorted(await journal.group_ids()) == ["g", "h"]


async def test_the_highest_number_of_a_task_is_found(journal: SQLiteJournal) -> None:
    assert await journal.last_number("task-0-") is None
    for id in ("task-0-9", "task-0-10", "task-0-77-0-80", "task-0-x", "task-1-99", "task-0.5"):
        await journal.commit(PutSession(make_row(id)))
    assert await journal.last_number("task-0-") == 10
    assert await journal.last_number("task-0-77-0-") == 80
    assert await journal.last_number("tas-0-") is None


async def test_the_newest_session_of_a_lane_is_found(journal: SQLiteJournal) -> None:
    for k, at in enumerate((1.0, 3.0, 3.0, 2.0)):
        await journal.commit(PutSession(make_row(f"s{k}", lane="lane", created_at=at)))
    newest = await journal.session_of_lane("lane")
    assert newest is not None
    assert newest.id == "s3"


def counted_transactions(
    journal: SQLiteJournal, monkeypatch: pytest.MonkeyPatch
) -> tuple[threading.Event, list[int]]:
    """What lets the transactions begin, and how many jobs each of them had."""
    transactions: list[int] = []
    transact = journal._writer._transact
    go = threading.Event()

    def counted(jobs: list) -> list:  # type: ignore[type-arg]
        assert go.wait(60)
        transactions.append(len(jobs))
        return transact(jobs)

    monkeypatch.setattr(journal._writer, "_transact", counted)
    return go, transactions


async def test_concurrent_writes_share_a_commit(
    journal: SQLiteJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, transactions = counted_transactions(journal, monkeypatch)
    writes = [journal.commit(PutMeta(f"k{k}", k)) for k in range(200)]
    tasks = [asyncio.create_task(write) for write in writes]
    await asyncio.sleep(0)
    go.set()
    await asyncio.gather(*tasks)
    assert sum(transactions) == 200
    assert len(transactions) <= 3


async def test_a_bad_write_harms_only_itself(journal: SQLiteJournal) -> None:
    bad = SetState(("s",), SessionState.TRAINED, reason="\ud800")
    results = await asyncio.gather(
        journal.commit(PutMeta("a", 1)),
        journal.commit(PutMeta("half", 1), bad),
        journal.commit(PutMeta("b", 2)),
        return_exceptions=True,
    )
    assert isinstance(results[1], StoreUnavailable)
    assert [results[0], results[2]] == [None, None]
    assert [await journal.meta(key) for key in ("a", "half", "b")] == [1, None, 2]


async def test_a_foreign_lock_fails_a_batch_at_once(
    journal: SQLiteJournal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One busy time-out, not one for each write."""
    journal._writer.connection.execute("PRAGMA busy_timeout = 20")
    other = sqlite3.connect(tmp_path / "j" / "rank-0.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    go, transactions = counted_transactions(journal, monkeypatch)
    tasks = [asyncio.create_task(journal.commit(PutMeta(f"k{k}", k))) for k in range(50)]
    await asyncio.sleep(0)
    go.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [StoreUnavailable] * 50
    assert sum(transactions) == 50
    assert len(transactions) <= 3
    other.execute("ROLLBACK")
    other.close()
    await journal.commit(PutMeta("k0", "after"))
    assert [await journal.meta(key) for key in ("k0", "k1")] == ["after", None]


async def test_more_than_it_takes_is_refused_and_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "MAX_QUEUE", 1)
    journal = SQLiteJournal(tmp_path / "j.sqlite")
    go, _ = counted_transactions(journal, monkeypatch)
    # One batch is under way, and one job waits.
    writes = [journal.commit(PutMeta(f"k{k}", k)) for k in range(writer.MAX_BATCH + 10)]
    tasks = [asyncio.create_task(write) for write in writes]
    await asyncio.sleep(0)
    go.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    refused = [k for k, result in enumerate(results) if type(result) is StoreBusy]
    assert len(refused) >= 9
    assert results.count(None) == len(results) - len(refused)
    assert [await journal.meta(f"k{k}") for k in refused] == [None] * len(refused)
    await journal.close()


async def test_a_bad_write_costs_one_more_transaction(
    journal: SQLiteJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, transactions = counted_transactions(journal, monkeypatch)
    writes = [journal.commit(PutMeta(f"k{k}", k)) for k in range(30)]
    writes.insert(20, journal.commit(SetState(("s",), SessionState.TRAINED, reason="\ud800")))
    tasks = [asyncio.create_task(write) for write in writes]
    await asyncio.sleep(0)
    go.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results.pop(20), StoreUnavailable)
    assert results == [None] * 30
    assert len(transactions) <= 4
    assert [await journal.meta(f"k{k}") for k in range(30)] == list(range(30))


async def test_a_lost_connection_is_told_to_everybody(tmp_path: Path) -> None:
    journal = SQLiteJournal(tmp_path / "j.sqlite")
    await journal.commit(PutMeta("a", 1))
    journal._writer.connection.close()
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


async def test_a_full_disk_refuses_writes_until_there_is_space(
    journal: SQLiteJournal, caplog: pytest.LogCaptureFixture
) -> None:
    """As SQLite reports it; what was acknowledged before stays readable."""
    await journal.commit(PutMeta("a", 1))
    execute = journal._writer.connection.execute
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
    # Once each, however many writes it was.
    said = [r for r in caplog.records if "journal" in r.name and r.levelno >= logging.WARNING]
    assert [r.levelname for r in said] == ["ERROR"]


class FailingCommit:
    """A connection whose commits fail, as on a disk that fails."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def execute(self, sql: str, *values: object) -> sqlite3.Cursor:
        if sql == "COMMIT":
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
            raise error
        return self._connection.execute(sql, *values)

    def __getattr__(self, name: str) -> object:
        return getattr(self._connection, name)


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
            await journal._writer.submit(writer.JournalJob(fails, writes=True))
        await journal.commit(PutMeta("a", 1))


async def test_a_commit_that_fails_says_that_it_is_not_sure(journal: SQLiteJournal) -> None:
    real = journal._writer.connection
    journal._writer.connection = FailingCommit(real)  # type: ignore[assignment]
    write, read = journal.commit(PutMeta("a", 1)), journal.meta("a")
    results = await asyncio.gather(write, read, return_exceptions=True)
    assert type(results[0]) is StoreUnavailable
    assert "check it before you try again" in str(results[0])
    # A read does not fail with the writes beside it.
    assert results[1] is None
    journal._writer.connection = real
    await journal.commit(PutMeta("a", 2))
    assert await journal.meta("a") == 2


def killed_writer(path: Path, prefix: str, lines: int) -> list[str]:
    """What a process acknowledged until it was killed, some time after so many lines."""
    writer = subprocess.Popen(
        [sys.executable, "-m", "tests.support.journal_writer", str(path), prefix],
        stdout=subprocess.PIPE,
        cwd=REPOSITORY,
        text=True,
    )
    assert writer.stdout is not None
    seen = [writer.stdout.readline() for _ in range(lines)]
    os.kill(writer.pid, signal.SIGKILL)
    seen += writer.stdout.readlines()
    writer.wait()
    # The very last line may be half a line.
    return [line for line in seen if line.endswith("\n")]


@pytest.mark.service
async def test_what_was_acknowledged_survives_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    chance = random.Random(0)
    acknowledged: dict[str, tuple[int, float]] = {}
    for k in range(5):
        for line in killed_writer(path, f"r{k}", chance.randrange(1, 400)):
            session_id, step, value = line.split()
            acknowledged[session_id] = STEPS.index(step), float(value)
    assert len(acknowledged) >= 5
    journal = SQLiteJournal(path)
    assert [r[0] for r in journal._writer.connection.execute("PRAGMA integrity_check")] == ["ok"]
    # No kill was ever taken for damage.
    assert not (tmp_path / "quarantine").exists()
    rows = {row.id: row for row in await journal.sessions(list(SessionState))}
    assert rows.keys() >= acknowledged.keys()
    for row in rows.values():
        reached, value = await reached_step(journal, row)
        least, told = acknowledged.get(row.id, (0, None))
        assert reached >= least
        assert told is None or value in (None, told)
    await journal.close()


async def reached_step(journal: SQLiteJournal, row: SessionRow) -> tuple[int, float | None]:
    """How far a session came, and its reward; what is written at once is there at once."""
    stored = await journal.interactions(row.id)
    answer = await journal.answer("session", row.id)
    rewards = await journal.rewards(row.id)
    value = rewards[0].value if rewards else None
    ended = row.state in (SessionState.FINALIZED, SessionState.REJECTED)
    assert (answer is not None) is ended
    assert row.final_reward == (value if ended else None)
    if row.state is SessionState.REJECTED:
        assert (row.content, stored) == ("deleted", [])
        return 3, value
    (one,) = stored
    (request,) = await journal.requests(row.id)
    assert (one.key, request.mark.hash) == (b"key", row.id.encode())
    assert one.interaction.reward == value
    assert request.delivered is (value is not None)
    return 2 if ended else int(bool(rewards)), value
