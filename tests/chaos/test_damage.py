"""A damaged journal: it is set aside, what can be read of it is served, and a session that lost
something is ended and never trained on. Whatever is damaged, nothing is served that was not
written."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from any_agent.chat import load_chat_format
from any_agent.errors import SessionDamaged, StartupError, StoreUnavailable
from any_agent.launcher.trial import trial_dir
from any_agent.record import pack_interaction
from any_agent.types import TERMINAL_STATES, SessionState
from proxy_ext.journal import (
    PutAnswer,
    PutInteraction,
    PutMeta,
    PutSession,
    SetReward,
    SetState,
    SQLiteJournal,
    Statement,
    files,
    schema,
)
from proxy_ext.journal.schema import set_file_format
from tests.chaos.conftest import Figure
from tests.support.errors import fails_with
from tests.support.journal import make_interaction, make_row
from tests.support.proxy import config_for, running_proxy, until
from tests.support.scripted_engine import ScriptedEngine

SESSIONS = 160
TURNS = 4
PAGE = 16_384
STATES = (
    SessionState.OPEN,
    SessionState.FINALIZED,
    SessionState.LEASED,
    SessionState.TRAINED,
    SessionState.EVALUATED,
)
DAMAGED = {
    SessionState.OPEN: SessionState.ABORTED,
    SessionState.FINALIZED: SessionState.REJECTED,
    SessionState.LEASED: SessionState.REJECTED,
}


@dataclass
class Written:
    """What a journal was given: all of it acknowledged."""

    folder: Path
    states: dict[str, SessionState]
    content: dict[str, list[bytes]]

    def copy(self, to: Path) -> Path:
        shutil.copytree(self.folder, to)
        return to / "rank-0.sqlite"


def statements(number: int) -> list[Statement]:
    """A session of some turns."""
    chance = random.Random(number)
    id = f"ses-0-{number:04d}"
    row = make_row(id, group_id=f"group-{number // 2}", group_size=2)
    out: list[Statement] = [PutSession(row)]
    parent = None
    for turn in range(TURNS):
        interaction = make_interaction(f"chatcmpl-{number:04d}-{turn}", id, parent)
        text = "".join(chance.choices("abcdefgh ", k=chance.choice((100, 3000, 9000))))
        interaction.message_delta = [{"role": "user", "content": text}]
        parent = interaction.id
        out.append(PutInteraction(interaction, key=text[:16].encode()))
    assert parent is not None
    out.append(SetReward(id, parent, None, 1.0, "session", 1.0, combined=1.0))
    state = STATES[number % len(STATES)]
    if state is not SessionState.OPEN:
        out.append(SetState((id,), state))
    return out


async def write(folder: Path) -> Written:
    journal = SQLiteJournal(folder / "rank-0.sqlite")
    written = Written(folder, {}, {})
    for number in range(SESSIONS):
        made = statements(number)
        await journal.commit(*made, PutMeta(f"k{number}", number))
        await journal.commit(PutAnswer("admin", f"k{number}", b"h", 200, b"{}", 1.0))
        id = f"ses-0-{number:04d}"
        written.states[id] = STATES[number % len(STATES)]
        written.content[id] = await stored(journal, id)
    await journal.close()
    return written


@pytest.fixture
async def written(tmp_path: Path) -> Written:
    return await write(tmp_path / "whole")


async def stored(journal: SQLiteJournal, session_id: str) -> list[bytes]:
    return [pack_interaction(one.interaction) for one in await journal.interactions(session_id)]


async def check(path: Path, written: Written) -> Counter[str]:
    """Open a damaged journal, and hold what it serves against what was written."""
    seen: Counter[str] = Counter()
    before = {file.name: file.read_bytes() for file in path.parent.iterdir() if file.is_file()}
    journal = SQLiteJournal(path)
    rows = {row.id: row for row in await journal.sessions(list(SessionState))}
    assert rows.keys() <= written.states.keys()
    for id, was in written.states.items():
        row = rows.get(id)
        if row is None:
            seen["unknown"] += 1
            continue
        if row.reason == "damaged":
            # Ended if it had not; in no case to be trained on (again).
            assert row.state is DAMAGED.get(was, was)
            assert row.state in TERMINAL_STATES
            # An ended session whose row and interactions are lost may be in an archive.
            gone = ("deleted", "archived") if was in TERMINAL_STATES else ("deleted",)
            assert row.content in gone and row.ended_at is not None
            assert await journal.interactions(id) == []
            seen["damaged"] += 1
            continue
        assert row.state is was
        try:
            assert await stored(journal, id) == written.content[id]
            seen["whole"] += 1
        except SessionDamaged:
            seen["found later"] += 1
    # It goes on.
    await journal.commit(*statements(SESSIONS))
    if journal.stats.damaged or (path.parent / "quarantine").exists():
        with closing(sqlite3.connect(path)) as other:
            assert other.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        check_quarantine(path, before)
    await journal.close()
    return seen


def check_quarantine(path: Path, before: dict[str, bytes]) -> None:
    """The damaged files are kept as they were."""
    (kept,) = (path.parent / "quarantine").iterdir()
    for name, content in before.items():
        if not name.endswith("-shm"):
            assert (kept / name).read_bytes() == content


def one_error(caplog: pytest.LogCaptureFixture) -> str:
    """The only line that the log has of it."""
    (line,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
    return line


def overwrite(path: Path, page: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(page * PAGE, os.SEEK_SET if page >= 0 else os.SEEK_END)
        file.write(data)


def page_of(path: Path, name: str) -> int:
    """The last leaf page of a table or an index, counted from 0."""
    with sqlite3.connect(path) as connection:
        sql = "SELECT rootpage FROM sqlite_master WHERE name = ?"
        (page,) = connection.execute(sql, (name,)).fetchone()
    content = path.read_bytes()
    # Interior pages have these kinds, and the number of their last child at their 8th byte.
    while content[(at := (page - 1) * PAGE)] in (2, 5):
        page = int.from_bytes(content[at + 8 : at + 12], "big")
    return int(page) - 1


async def test_a_damaged_last_page_costs_few_sessions_and_is_reported_once(
    written: Written, tmp_path: Path, caplog: pytest.LogCaptureFixture, figure: Figure
) -> None:
    path = written.copy(tmp_path / "damaged")
    overwrite(path, -1, os.urandom(PAGE))
    seen = await check(path, written)
    assert 1 <= seen["damaged"] <= 3
    assert seen["whole"] + seen["damaged"] == SESSIONS
    line = one_error(caplog)
    for part in (str(path), str(path.parent / "quarantine"), "check the disk", "never trained on"):
        assert part in line
    figure(f"damaged last page: of {SESSIONS} sessions {dict(seen)}")
    # The salvaged journal is sound: nothing is found, nothing is said at the next start.
    caplog.clear()
    journal = SQLiteJournal(path)
    assert journal.stats.damaged == 0
    assert caplog.records == []
    await journal.close()


@pytest.mark.parametrize(
    ("of", "most"),
    [
        ("interactions", 12),
        ("sessions", SESSIONS),
        ("rewards", 32),
        ("interactions_by_session", 0),
        ("sqlite_autoindex_interactions_1", 0),
        ("sessions_by_state", 0),
    ],
)
@pytest.mark.gate
async def test_a_damaged_middle_page_costs_few_sessions_and_no_name(
    written: Written, tmp_path: Path, figure: Figure, of: str, most: int
) -> None:
    path = written.copy(tmp_path / "damaged")
    overwrite(path, page_of(path, of), os.urandom(PAGE))
    seen = await check(path, written)
    # Every session's name is still known, by the indexes.
    assert seen["whole"] + seen["damaged"] == SESSIONS
    assert (seen["damaged"] > 0) is (most > 0)
    assert seen["damaged"] <= most
    figure(f"damaged page of {of}: of {SESSIONS} sessions {dict(seen)}")


async def test_no_damaged_page_makes_a_journal_serve_anything_wrong(
    written: Written, tmp_path: Path, long: bool, figure: Figure
) -> None:
    """Zeros, noise and another page's content, on any page but the first, never serve anything
    wrong."""
    pages = written.copy(tmp_path / "count").stat().st_size // PAGE
    chance, total = random.Random(1), Counter[str]()
    tries = 200 if long else 25
    for number in range(tries):
        path = written.copy(tmp_path / f"damaged-{number}")
        other = chance.randrange(1, pages) * PAGE
        content = path.read_bytes()[other : other + PAGE]
        what = chance.choice([bytes(PAGE), chance.randbytes(PAGE), content])
        overwrite(path, chance.randrange(1, pages), what)
        total += await check(path, written)
        shutil.rmtree(path.parent)
    figure(f"{tries} journals with a damaged page: of {tries * SESSIONS} sessions {dict(total)}")
    assert total["whole"] > tries * SESSIONS / 2


async def test_damage_that_no_check_finds_is_salvaged_at_the_start_after_it_was_met(
    written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a journal that is too large to be checked whole: once met, the next start salvages."""
    monkeypatch.setattr(files, "_MAX_CHECKED_BYTES", 0)
    path = written.copy(tmp_path / "damaged")
    overwrite(path, page_of(path, "sqlite_autoindex_interactions_1"), bytes(PAGE))
    journal = SQLiteJournal(path)
    assert journal.stats.damaged == 0
    with pytest.raises(StoreUnavailable):
        for number in range(SESSIONS, SESSIONS + 20):
            await journal.commit(*statements(number))
    await journal.close()
    for _ in range(2):
        journal = SQLiteJournal(path)
        rows = await journal.sessions(list(SessionState))
        assert {row.id: row.state for row in rows if row.id in written.states} == written.states
        await journal.close()
    assert len(list((path.parent / "quarantine").iterdir())) == 1


async def test_a_flipped_bit_in_a_blob_is_found_when_the_row_is_read(
    written: Written, tmp_path: Path, figure: Figure, caplog: pytest.LogCaptureFixture
) -> None:
    """SQLite sees nothing of it; the row's checksum does, when it is read."""
    path = written.copy(tmp_path / "damaged")
    content = bytearray(path.read_bytes())
    victim = "ses-0-0004"
    # Amid its messages.
    longest = max(written.content[victim], key=len)
    content[content.index(longest[-300:-240]) + 30] ^= 1
    path.write_bytes(content)
    seen = await check(path, written)
    assert seen == {"whole": SESSIONS - 1, "found later": 1}
    assert f"chatcmpl-0004-{written.content[victim].index(longest)}" in one_error(caplog)
    figure(f"a flipped bit: of {SESSIONS} sessions {dict(seen)}")


@pytest.mark.parametrize("left", [0.9, 0.5, 0.2])
@pytest.mark.gate
async def test_sessions_in_the_rest_of_a_truncated_journal_are_saved(
    written: Written, tmp_path: Path, figure: Figure, left: float
) -> None:
    path = written.copy(tmp_path / "damaged")
    os.truncate(path, int(path.stat().st_size * left))
    seen = await check(path, written)
    assert seen["whole"] + seen["damaged"] + seen["unknown"] == SESSIONS
    assert seen["damaged"] >= 1
    figure(f"truncated to {left:.0%}: of {SESSIONS} sessions {dict(seen)}")


@pytest.mark.parametrize("how", ["a frame", "its header", "noise"])
async def test_a_garbage_log_loses_what_followed_and_says_so(
    tmp_path: Path, figure: Figure, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """What was committed behind the damage is lost: whatever was live may be, and is ended."""
    folder = tmp_path / "live"
    journal = SQLiteJournal(folder / "rank-0.sqlite")
    for number in range(SESSIONS // 2):
        await journal.commit(*statements(number))
    with closing(sqlite3.connect(folder / "rank-0.sqlite")) as reader:
        reader.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        # What it may still read keeps all later commits in the log.
        reader.execute("BEGIN")
        reader.execute("SELECT COUNT(*) FROM sessions").fetchone()
        for number in range(SESSIONS // 2, SESSIONS):
            await journal.commit(*statements(number))
        # As a kill -9 leaves it.
        shutil.copytree(folder, tmp_path / "damaged")
    await journal.close()
    path = tmp_path / "damaged" / "rank-0.sqlite"
    log = path.with_name("rank-0.sqlite-wal")
    content = bytearray(log.read_bytes())
    if how == "a frame":
        content[32 + 24 + 100] ^= 1
    elif how == "its header":
        content[:32] = bytes(32)
    else:
        content[:] = os.urandom(len(content))
    log.write_bytes(content)
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    journal = SQLiteJournal(path)
    rows = await journal.sessions(list(SessionState))
    assert len(rows) == SESSIONS // 2
    for row in rows:
        was = STATES[int(row.id[-4:]) % len(STATES)]
        assert row.state is DAMAGED.get(was, was)
        assert (row.reason == "damaged") is (was in DAMAGED)
    assert "newest commits" in one_error(caplog)
    assert journal.stats.damaged == sum(row.reason == "damaged" for row in rows)
    check_quarantine(path, before)
    await journal.close()
    figure(f"damaged log ({how}): {SESSIONS // 2} sessions lost and said so, the live ones ended")


def dying_at(number: int) -> Callable[[Path, Path], Path]:
    """A rename that is not reached any more, after so many that were."""
    rename = Path.rename
    done: list[Path] = []

    def killed(file: Path, to: Path) -> Path:
        if len(done) == number:
            raise KeyboardInterrupt
        done.append(to)
        return rename(file, to)

    return killed


@pytest.mark.gate
async def test_a_salvage_that_was_killed_goes_on_at_the_next_start(
    written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At whatever rename: the next start goes on with it."""
    for stop_at in range(4):
        path = written.copy(tmp_path / f"damaged-{stop_at}")
        overwrite(path, page_of(path, "interactions"), os.urandom(PAGE))
        with monkeypatch.context() as dying, contextlib.suppress(KeyboardInterrupt):
            dying.setattr(Path, "rename", dying_at(stop_at))
            await SQLiteJournal(path).close()
        journal = SQLiteJournal(path)
        rows = await journal.sessions(list(SessionState))
        assert len(rows) == SESSIONS
        assert any(row.reason == "damaged" for row in rows)
        await journal.close()
        assert list((path.parent / "quarantine").rglob("rank-0.sqlite")) != []


async def test_a_salvage_without_room_fails_and_leaves_the_journal_as_it_was(
    written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start says so, and everything is as it was: the next one may have more room."""
    path = written.copy(tmp_path / "damaged")
    overwrite(path, page_of(path, "interactions"), os.urandom(PAGE))
    before = path.read_bytes()

    def small(connection: sqlite3.Connection) -> None:
        set_file_format(connection)
        connection.execute("PRAGMA max_page_count = 40")

    with monkeypatch.context() as full:
        full.setattr(schema, "set_file_format", small)
        with fails_with(StartupError, "disk"):
            SQLiteJournal(path)
    assert path.read_bytes() == before
    assert {file.name for file in path.parent.iterdir()} <= {
        path.name,
        f"{path.name}-wal",
        f"{path.name}-shm",
    }
    seen = await check(path, written)
    assert seen["damaged"] > 0


async def test_a_journal_that_cannot_be_read_is_refused_and_left_as_it_is(
    written: Written, tmp_path: Path
) -> None:
    path = written.copy(tmp_path / "damaged")
    first_page = os.urandom(PAGE) + path.read_bytes()[PAGE:]
    for content in (b"", b"no database" * 1000, first_page):
        path.write_bytes(content)
        with fails_with(StartupError, str(path), "replace"):
            SQLiteJournal(path)
        # It is left where it is, as it is.
        assert path.read_bytes() == content


async def test_damage_found_at_run_time_ends_only_the_sessions_that_have_it(
    tmp_path: Path, tiny_model_dir: Path, figure: Figure
) -> None:
    """Only the sessions whose blobs are damaged end; the trainer and the agents go on."""
    chat = load_chat_format(str(tiny_model_dir), enable_thinking=False)
    config = config_for(tmp_path, "sessions.group_size=1", "sessions.min_group_size=1")
    path = trial_dir(config).journal(0)
    texts = {name: f"canary of {name}" for name in ("open", "final", "sound")}
    engine = ScriptedEngine(decode=chat.decode)
    async with engine.serve():
        async with running_proxy(config, chat, engine_url=engine.url) as proxy:
            await proxy.admit(100)
            sessions = {name: await proxy.open() for name in texts}
            for name, text in texts.items():
                key = sessions[name]["api_key"]
                await proxy.complete(key, [{"role": "user", "content": text}])
                if name != "open":
                    await proxy.post("/rl/v1/finalize", {"final_reward": 1}, key)
        content = bytearray(path.read_bytes())
        for name in ("open", "final"):
            content[content.index(texts[name].encode()) + 3] ^= 1
        path.write_bytes(content)
        async with running_proxy(config, chat, engine_url=engine.url) as proxy:
            await proxy.admit(100)
            refused = await proxy.call(sessions["open"]["api_key"])
            assert refused.status_code == 410
            assert refused.json()["error"]["code"] == "session_damaged"
            # A poll that met the other one has nothing to hand out.
            leased = [t.session_id for t in await until(lambda: proxy.lease(wait=1.0))]
            assert leased == [sessions["sound"]["session_id"]]

            async def shown(name: str) -> dict[str, str]:
                id = sessions[name]["session_id"]
                response = await proxy.http.get(f"/rl/v1/sessions/{id}")
                return dict(response.json()) if response.status_code == 200 else {}

            async def ended(name: str) -> bool:
                return (await shown(name)).get("reason") == "damaged"

            await until(lambda: ended("open"))
            await until(lambda: ended("final"))
            states = [(await shown(name))["state"] for name in ("open", "final", "sound")]
            assert states == ["aborted", "rejected", "leased"]
            assert (await shown("open"))["content"] == "deleted"
            again = await proxy.call(sessions["open"]["api_key"])
            assert (again.status_code, again.json()["error"]["code"]) == (410, "session_closed")
            assert await proxy.lease(wait=0.0) == []
            metrics = (await proxy.http.get("/metrics")).text
            assert 'any_agent_journal_damaged_total{rank="0"} 2.0' in metrics or (
                "any_agent_journal_damaged_total 2.0" in metrics
            )
    figure("two damaged blobs under a running proxy: two sessions ended, the third handed out")
