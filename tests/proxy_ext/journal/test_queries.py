"""The journal's reads over many sessions: what may be archived, and pages for people."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from any_agent.types import SessionState
from proxy_ext.journal import (
    ArchiveContent,
    PutInteraction,
    PutSession,
    SessionFilter,
    SetReward,
    SQLiteJournal,
)
from proxy_ext.journal import (
    sqlite as listing,
)
from tests.support.journal import make_interaction, make_row

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


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[SQLiteJournal]:
    journal = SQLiteJournal(tmp_path / "rank-0.sqlite")
    yield journal
    await journal.close()


async def ended(journal: SQLiteJournal, oldest_step: int | None, *, limit: int = 99) -> list[str]:
    found = await journal.ended(before=100.0, oldest_step=oldest_step, limit=limit)
    return [each.row.id for each in found]


async def test_what_a_resume_may_want_is_kept(journal: SQLiteJournal) -> None:
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


async def test_what_was_archived_is_not_looked_at(tmp_path: Path) -> None:
    """Tombstones stay for good: however many, they are not to hold up the writes."""
    journal = SQLiteJournal(tmp_path / "rank-0.sqlite")
    await journal.close()
    connection = sqlite3.connect(tmp_path / "rank-0.sqlite")
    values = {"before": 1.0, "oldest_step": 1, "limit": 9}
    plan = connection.execute(f"EXPLAIN QUERY PLAN {listing._ENDED}", values).fetchall()
    connection.close()
    assert [row[3] for row in plan] == ["SEARCH sessions USING INDEX sessions_by_end (ended_at<?)"]


async def test_archived_content_leaves_the_journal(journal: SQLiteJournal) -> None:
    for id in ("a", "b"):
        await journal.commit(
            PutSession(make_row(id, state=SessionState.TRAINED, final_reward=1.0)),
            PutInteraction(make_interaction(f"i-{id}", id)),
            SetReward(id, f"i-{id}", None, 1.0, "me", 1.0, 1.0),
        )
    await journal.commit(ArchiveContent(("a",)))
    row = await journal.session("a")
    assert row is not None
    assert (row.content, row.metadata, row.final_reward) == ("archived", {}, 1.0)
    assert (await journal.interactions("a"), await journal.rewards("a")) == ([], [])
    kept = await journal.session("b")
    assert kept is not None and kept.content == "stored" and kept.metadata
    assert len(await journal.interactions("b")) == len(await journal.rewards("b")) == 1


async def test_its_space_is_given_back(journal: SQLiteJournal) -> None:
    big = make_interaction("i", "a")
    big.output_message = {"role": "assistant", "content": "x" * 3_000_000}
    await journal.commit(PutSession(make_row("a")), PutInteraction(big))
    full = journal.size()
    assert full > 3_000_000
    await journal.commit(ArchiveContent(("a",)))
    left = [await journal.trim() for _ in range(4)]
    assert left[0] > 1_000_000 and left[-1] == 0 and left == sorted(left, reverse=True)
    await journal.close()
    assert journal.size() < full / 10


async def test_pages(journal: SQLiteJournal, monkeypatch: pytest.MonkeyPatch) -> None:
    for k in range(10):
        of = {"task_id": f"t{k % 2}", "group_id": f"g{k % 5}", "tenant": "x" if k % 3 else None}
        await journal.commit(PutSession(make_row(f"s{k}", **of)))
    await journal.commit(PutInteraction(make_interaction("i", "s9")))

    async def all(wanted: SessionFilter, limit: int) -> list[str]:
        out: list[str] = []
        before = None
        while True:
            page = await journal.page(wanted, before=before, limit=limit)
            assert len(page.rows) <= limit
            out += [each.row.id for each in page.rows]
            before = page.before
            if before is None:
                return out

    newest = [f"s{k}" for k in reversed(range(10))]
    assert await all(SessionFilter(), 3) == await all(SessionFilter(), 10) == newest
    assert await all(SessionFilter(task_id="t1"), 2) == ["s9", "s7", "s5", "s3", "s1"]
    assert await all(SessionFilter(group_id="g0", tenant="x"), 9) == ["s5"]
    assert await all(SessionFilter(state=SessionState.TRAINED), 9) == []
    first = (await journal.page(SessionFilter(), before=None, limit=1)).rows[0]
    assert (first.number, first.interactions) == (10, 1)
    # However rare the wanted ones are, one page looks at so many and no more.
    monkeypatch.setattr(listing, "_MAX_SCANNED", 4)
    assert await all(SessionFilter(task_id="t0"), 9) == ["s8", "s6", "s4", "s2", "s0"]
    empty = await journal.page(SessionFilter(state=SessionState.TRAINED), before=None, limit=9)
    assert (empty.rows, empty.before) == ([], 7)
    assert await journal.number("s3") == 4
    assert await journal.number("none") is None
