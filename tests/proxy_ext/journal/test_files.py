"""A journal's files: made whole, taken over from version 1, refused where they cannot be used."""

from __future__ import annotations

import json
import os
import random
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from any_agent.errors import StartupError, StoreUnavailable
from any_agent.launcher.trial import trial_dir
from any_agent.record import pack_interaction
from any_agent.types import TERMINAL_STATES, SessionState, id_array, logprob_array
from proxy_ext.journal import (
    EraseContent,
    PutInteraction,
    PutMeta,
    PutSession,
    RequestMark,
    SQLiteJournal,
)
from proxy_ext.journal.wal import UNSYNCED, has_lost_commits
from tests.support.errors import fails_with
from tests.support.journal import make_interaction, make_row
from tests.support.proxy import config_for
from tests.support.proxy_fixtures import Start

VERSION_1 = Path(__file__).with_name("journal_1.sql")


def old_journal(path: Path) -> None:
    """A journal as version 1 wrote it, dumped from a real one."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript(VERSION_1.read_text())


async def test_a_journal_of_version_1_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.sqlite"
    old_journal(path)
    for _ in range(2):
        journal = SQLiteJournal(path)
        assert journal.stats.damaged == 0
        # In the order of their creation; the later ones were the first.
        rows = await journal.sessions(list(SessionState))
        assert [row.id for row in rows] == ["ses-0-3", "ses-0-2", "ses-0-1", "ses-0-0"]
        opened = make_row("ses-0-0", created_at=1000.0, expires_at=4600.0)
        assert rows[-1] == opened
        assert (rows[1].state, rows[1].final_reward) == (SessionState.TRAINED, 0.5)
        assert (rows[1].ended_at, rows[1].content) == (4598.0, "stored")
        assert [row.id for row in await journal.group("task~1")] == ["ses-0-2", "ses-0-1"]
        first, second = await journal.interactions("ses-0-2")
        expected = make_interaction("chatcmpl-2a", "ses-0-2")
        assert pack_interaction(first.interaction) == pack_interaction(expected)
        assert (second.interaction.parent_id, second.interaction.reward) == ("chatcmpl-2a", 0.5)
        assert first.key is None
        run = {"state": "training", "step": 3, "checkpoint": None}
        assert await journal.meta("run") == run
        await journal.close()
    journal = SQLiteJournal(path)
    await journal.commit(PutSession(make_row("new")), PutMeta("k", "x" * 8_000_000))
    await journal.commit(PutMeta("k", None))
    assert await journal.trim() == 0, "it cannot give space back, nor does it try for ever"
    rows = await journal.sessions([SessionState.OPEN])
    assert [row.id for row in rows] == ["ses-0-0", "new"]
    await journal.close()


async def test_sessions_of_version_2_are_their_agents_to_reward(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.sqlite"
    journal = SQLiteJournal(path)
    await journal.commit(PutSession(make_row("old", rewarded_by="judge")))
    await journal.close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("ALTER TABLE sessions DROP COLUMN rewarded_by")
        connection.execute("PRAGMA user_version = 2")
    journal = SQLiteJournal(path)
    await journal.commit(PutSession(make_row("new", rewarded_by="judge")))
    rows = [await journal.session(id) for id in ("old", "new")]
    assert [row and row.rewarded_by for row in rows] == ["agent", "judge"]
    await journal.close()


async def test_a_takeover_leaves_no_second_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what may be deleted one day. Whether SQLite does so unasked depends on how it is built."""
    path = tmp_path / "rank-0.sqlite"
    old_journal(path)
    connect = sqlite3.connect

    def careless(*args: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*args, **options)
        connection.execute("PRAGMA secure_delete = OFF")
        return connection

    monkeypatch.setattr(sqlite3, "connect", careless)
    journal = SQLiteJournal(path)
    await journal.commit(EraseContent(tuple(f"ses-0-{k}" for k in range(4))))
    await journal.close()
    assert b"message_delta" not in path.read_bytes()


async def test_a_takeover_that_fails_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.sqlite"
    old_journal(path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE answers (x)")
        with fails_with(StartupError, "answers"):
            SQLiteJournal(path)
        assert connection.execute("PRAGMA user_version").fetchone() == (1,)
        assert connection.execute("SELECT COUNT(*) FROM sessions").fetchone() == (4,)
        connection.execute("DROP TABLE answers")
    await SQLiteJournal(path).close()


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
    newer = tmp_path / "newer.sqlite"
    with sqlite3.connect(newer) as connection:
        connection.execute("PRAGMA user_version = 99")
    with fails_with(StartupError, "version 99", "3"):
        SQLiteJournal(newer)
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


async def test_a_trial_of_version_1_goes_on(start: Start, tmp_path: Path) -> None:
    """Its folder is of the same format, and its journal is taken over: its sessions go on."""
    path = trial_dir(config_for(tmp_path)).journal(0)
    path.parent.mkdir(parents=True)
    (path.parent.parent / "format").write_text("2\n")
    old_journal(path)
    proxy = await start()
    ended = (await proxy.http.get("/rl/v1/sessions/ses-0-3")).json()
    assert (ended["state"], ended["interactions"]) == ("evaluated", 2)
    # Continued under the keys that version 1 did not store.
    session = await proxy.service.sessions.by_id("ses-0-2")
    await proxy.service.sessions.load(session)
    keys = [session.tree.key(i.id) for i in session.tree]
    assert len({*keys}) == 2
    assert None not in keys
