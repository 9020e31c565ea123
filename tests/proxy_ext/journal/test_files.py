"""A journal's files: made whole, refused where they cannot be used."""

from __future__ import annotations

import json
import os
import random
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from any_agent.errors import StartupError, StoreUnavailable
from any_agent.types import TERMINAL_STATES, SessionState, id_array, logprob_array
from proxy_ext.journal import (
    PutInteraction,
    PutMeta,
    PutSession,
    RequestMark,
    SQLiteJournal,
)
from proxy_ext.journal.wal import UNSYNCED, has_lost_commits
from tests.support.errors import fails_with
from tests.support.journal import make_interaction, make_row


async def test_a_file_that_lost_free_pages_only_loses_no_session(tmp_path: Path) -> None:
    """SQLite refuses it, and its check, once the pages are there again, finds nothing wrong."""
    path = tmp_path / "rank-0.sqlite"
    journal = SQLiteJournal(path)
    await journal.commit(PutSession(make_row("a")), PutMeta("k", "x" * 3_000_000))
    await journal.commit(PutMeta("k", None))
    await journal.close()
    os.truncate(path, path.stat().st_size - 100_000)
    for _ in range(2):
        journal = SQLiteJournal(path)
        assert journal.stats.damaged == 0
        assert await journal.session("a") == make_row("a")
        await journal.close()


@pytest.mark.parametrize("damage", ["metadata = x'7b'", "task_id = CAST(x'ff' AS TEXT)"])
async def test_a_session_whose_row_is_damaged_is_ended_at_the_next_start(
    tmp_path: Path, damage: str
) -> None:
    """SQLite finds nothing wrong with it; once met, the next start ends it."""
    path = tmp_path / "rank-0.sqlite"
    journal = SQLiteJournal(path)
    await journal.commit(PutSession(make_row("a")), PutSession(make_row("b")))
    await journal.close()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"UPDATE sessions SET {damage} WHERE id = 'b'")
    journal = SQLiteJournal(path)
    with pytest.raises(StoreUnavailable):
        await journal.sessions(list(SessionState))
    await journal.close()
    journal = SQLiteJournal(path)
    assert journal.stats.damaged == 1
    a, b = await journal.sessions(list(SessionState))
    assert a == make_row("a")
    assert (b.id, b.reason, b.content) == ("b", "damaged", "deleted")
    assert b.state in TERMINAL_STATES
    await journal.close()


def test_files_that_are_no_journal_are_refused(tmp_path: Path) -> None:
    for version in (4, 99):
        other = tmp_path / f"{version}.sqlite"
        with sqlite3.connect(other) as connection:
            connection.execute(f"PRAGMA user_version = {version}")
        with fails_with(StartupError, f"version {version}", "5", "--trial"):
            SQLiteJournal(other)
    foreign = tmp_path / "foreign.sqlite"
    with sqlite3.connect(foreign) as connection:
        connection.execute("CREATE TABLE t (x)")
    with fails_with(StartupError, foreign):
        SQLiteJournal(foreign)
    (tmp_path / "file").write_text("x")
    with fails_with(StartupError, tmp_path / "file" / "j.sqlite"):
        SQLiteJournal(tmp_path / "file" / "j.sqlite")


async def test_a_new_journal_is_whole_or_not_there(tmp_path: Path) -> None:
    """What a creation left that was killed is no journal."""
    path = tmp_path / "journal" / "rank-0.sqlite"
    path.parent.mkdir()
    path.with_name(".new-rank-0.sqlite").write_bytes(b"half a file")
    await SQLiteJournal(path).close()
    assert os.listdir(path.parent) == ["rank-0.sqlite"]


def test_lost_commits_in_a_log_are_found_as_sqlite_finds_them(tmp_path: Path) -> None:
    """Against what SQLite itself reads of the same log."""
    path, copy = tmp_path / "w.sqlite", tmp_path / "copy.sqlite"
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE t (x)")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    for _ in range(30):
        connection.execute("INSERT INTO t VALUES (?)", (os.urandom(3000),))
    log = (tmp_path / "w.sqlite-wal").read_bytes()
    frame = 24 + 4096
    frames = (len(log) - 32) // frame
    for at in (0, 1, frames // 2, *range(frames - 9, frames), None):
        damaged = bytearray(log)
        if at is not None:
            damaged[32 + at * frame + 1000] ^= 1
        copy.write_bytes(path.read_bytes())
        copy_log = tmp_path / "copy.sqlite-wal"
        copy_log.write_bytes(damaged)
        found = has_lost_commits(copy_log)
        other = sqlite3.connect(copy)
        (rows,) = other.execute("SELECT COUNT(*) FROM t").fetchone()
        other.close()
        # The last ones may be those that a crash cut off: they were not fsynced yet.
        assert found is (rows < 29 - UNSYNCED)
    # A log that began anew has older frames behind its end.
    connection.execute("PRAGMA wal_checkpoint(RESTART)")
    connection.execute("INSERT INTO t VALUES (1)")
    assert len(log) == (tmp_path / "w.sqlite-wal").stat().st_size
    assert not has_lost_commits(tmp_path / "w.sqlite-wal")
    # The header itself.
    (tmp_path / "copy.sqlite-wal").write_bytes(bytes(32) + log[32:])
    assert has_lost_commits(tmp_path / "copy.sqlite-wal")
    assert not has_lost_commits(tmp_path / "none-wal")
    connection.close()


@pytest.mark.parametrize(("prompt", "output"), [(125, 125), (250, 60), (40, 300), (500, 500)])
async def test_the_size_of_a_long_episode_grows_with_its_tokens_only(
    tmp_path: Path, prompt: int, output: int
) -> None:
    """200 turns: each is stored as what it adds, so the size grows with the tokens, not with
    their square; and little is lost between the rows."""
    path = tmp_path / "j.sqlite"
    await SQLiteJournal(path).close()
    empty = path.stat().st_size
    journal = SQLiteJournal(path)
    chance, messages = random.Random(1), 0
    parent = None
    for number in range(200):
        turn = make_interaction(f"chatcmpl-{number:032d}", "ses-0-0123456789abcdef", parent)
        parent = turn.id
        turn.prompt_delta_ids = id_array(chance.choices(range(150_000), k=prompt))
        turn.output_ids = id_array(chance.choices(range(150_000), k=output))
        turn.output_logprobs = logprob_array([chance.random() for _ in range(output)])
        turn.output_versions = id_array([number // 50] * output)
        turn.message_delta = [{"role": "user", "content": "word " * (prompt // 2)}]
        messages += len(json.dumps([*turn.message_delta, turn.output_message]))
        mark = RequestMark(chance.randbytes(16), 0)
        await journal.commit(PutInteraction(turn, chance.randbytes(16), mark))
    await journal.close()
    tokens = 200 * (4 * prompt + 12 * output)
    assert path.stat().st_size - empty <= 1.3 * tokens + messages
