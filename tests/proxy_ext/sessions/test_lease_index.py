"""A poll costs what has changed since the last one, however many sessions there are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from any_agent.types import SessionState
from proxy_ext.sessions import indexes as module
from proxy_ext.sessions.groups import GroupBook
from proxy_ext.sessions.ids import SessionIds
from proxy_ext.sessions.indexes import LeaseIndex
from proxy_ext.sessions.session import RecordedSession
from tests.support.journal import make_row
from tests.support.proxy_fixtures import Start


def test_polls_among_ten_thousand_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    live = {
        f"s{k}": RecordedSession(make_row(f"s{k}", created_at=float(k), state=SessionState.OPEN))
        for k in range(10_000)
    }
    leasable = LeaseIndex(live, GroupBook(SessionIds(0), timeout=60, min_size=1))
    looked: list[object] = []
    members = leasable._members
    monkeypatch.setattr(leasable, "_members", lambda key: (looked.append(key), members(key))[1])

    def move(k: int, state: SessionState) -> None:
        session = live[f"s{k}"]
        session.row = replace(session.row, state=state)
        leasable.update(session)

    for k in range(0, 10_000, 2):
        move(k, SessionState.FINALIZED)
    assert [s.id for (s,) in leasable.first(2)] == ["s0", "s2"]
    looked.clear()
    for _ in range(100):
        leasable.first(1)
    assert len(looked) == 100
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
    assert len(looked) < 120


def test_where_nobody_polls_nothing_piles_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_PENDING", 10)
    live: dict[str, RecordedSession] = {}
    leasable = LeaseIndex(live, GroupBook(SessionIds(0), timeout=60, min_size=1))
    for k in range(100):
        session = RecordedSession(
            make_row(f"s{k}", created_at=float(k), state=SessionState.FINALIZED)
        )
        live[session.id] = session
        leasable.update(session)
        if k != 50:
            session.row = replace(session.row, state=SessionState.ABORTED)
            del live[session.id]
            leasable.update(session)
    assert len(leasable._pending) + len(leasable._positions) <= 12
    assert [s.id for (s,) in leasable.first(2)] == ["s50"]


async def test_groups_are_found_after_a_restart(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many sessions were recovered before their groups were."""
    monkeypatch.setattr(module, "_MAX_PENDING", 0)
    proxy = await start()
    await proxy.admit(8)
    ids = [(await proxy.finished_session(group_id="g"))["session_id"] for _ in range(2)]
    again = await start()
    assert [t.session_id for t in await again.lease()] == ids
