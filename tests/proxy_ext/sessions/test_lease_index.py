"""A poll costs what has changed since the last one, however many sessions there are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from any_agent.types import SessionState
from proxy_ext.sessions import indexes as module
from proxy_ext.sessions.groups import GroupBook
from proxy_ext.sessions.ids import SessionIds
from proxy_ext.sessions.indexes import LeaseIndex
from proxy_ext.sessions.session import RecordedSession
from tests.support.journal import make_row
from tests.support.proxy_fixtures import Start


class Counted(dict[str, RecordedSession]):
    """Counts how often a session is looked at."""

    looks = 0

    def get(self, id: str, default: Any = None) -> Any:
        self.looks += 1
        return super().get(id, default)


def index_of(live: dict[str, RecordedSession]) -> LeaseIndex:
    return LeaseIndex(live, GroupBook(SessionIds(0), timeout=60, min_size=1))


def test_polls_among_ten_thousand_sessions() -> None:
    live = Counted()
    leasable = index_of(live)

    def move(k: int, state: SessionState) -> None:
        row = make_row(f"s{k}", created_at=float(k), state=state)
        live.setdefault(row.id, RecordedSession(row)).row = row
        leasable.update(live[row.id])

    for k in range(10_000):
        move(k, SessionState.OPEN if k % 2 else SessionState.FINALIZED)
    assert [s.id for (s,) in leasable.first(2)] == ["s0", "s2"]
    live.looks = 0
    for _ in range(100):
        leasable.first(1)
    assert live.looks == 100
    # The oldest first, whenever it became ready.
    move(0, SessionState.LEASED)
    move(1, SessionState.FINALIZED)
    assert [s.id for (s,) in leasable.first(2)] == ["s1", "s2"]
    assert [s.id for s in leasable.leased] == ["s0"]
    move(0, SessionState.FINALIZED)
    move(1, SessionState.REJECTED)
    del live["s1"]
    assert [s.id for (s,) in leasable.first(2)] == ["s0", "s2"]
    assert list(leasable.leased) == []
    assert live.looks < 120


def test_where_nobody_polls_nothing_piles_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PENDING", 10)
    live: dict[str, RecordedSession] = {}
    leasable = index_of(live)
    for k in range(100):
        row = make_row(f"s{k}", created_at=float(k), state=SessionState.FINALIZED)
        session = live[row.id] = RecordedSession(row)
        leasable.update(session)
        if k != 50:
            session.row = replace(row, state=SessionState.ABORTED)
            del live[row.id]
            leasable.update(session)
    kept = [each for each in vars(leasable).values() if isinstance(each, list | set | dict)]
    assert sum(map(len, kept)) < 20
    assert [s.id for (s,) in leasable.first(2)] == ["s50"]


async def test_groups_are_found_after_a_restart(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many sessions were recovered before their groups were."""
    monkeypatch.setattr(module, "MAX_PENDING", 0)
    proxy = await start(admit=8)
    ids = [(await proxy.finished_session(group_id="g"))["session_id"] for _ in range(2)]
    again = await start()
    assert [t.session_id for t in await again.lease()] == ids
