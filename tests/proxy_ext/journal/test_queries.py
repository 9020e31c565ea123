"""The journal's reads over many sessions: what may be archived, and pages for people."""

from __future__ import annotations

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
    SQLiteJournal,
    sqlite,
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


async def test_the_space_of_archived_content_is_given_back(journal: SQLiteJournal) -> None:
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


async def test_pages_have_every_session_once_newest_first(
    journal: SQLiteJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    monkeypatch.setattr(sqlite, "MAX_SCANNED", 4)
    assert await all(SessionFilter(task_id="t0"), 9) == ["s8", "s6", "s4", "s2", "s0"]
    empty = await journal.page(SessionFilter(state=SessionState.TRAINED), before=None, limit=9)
    assert (empty.rows, empty.before) == ([], 7)
