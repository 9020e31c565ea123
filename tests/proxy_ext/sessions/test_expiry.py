"""The end of sessions' time: ttl, idle time, heartbeats, and clocks that are set."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import pytest

from any_agent.config import load_config
from any_agent.runtime import boot_clock
from any_agent.runtime.boot_clock import clock_stamp
from any_agent.types import SessionState
from proxy_ext.journal import PutSession, SQLiteJournal
from proxy_ext.sessions import expiry
from proxy_ext.sessions.ids import SessionIds
from proxy_ext.sessions.indexes import DeadlineQueue
from proxy_ext.sessions.session import RecordedSession, session_age
from proxy_ext.sessions.session_store import SessionStore
from tests.proxy_ext.api.test_refusals import refusal
from tests.support.journal import make_row
from tests.support.proxy import Proxy, until
from tests.support.proxy_fixtures import Start
from tests.support.scripted_engine import ScriptedEngine


async def expired(proxy: Proxy, session: dict[str, Any]) -> dict[str, Any]:
    """What is said of it once it has expired."""

    async def over() -> dict[str, Any] | None:
        await proxy.service.expiry.sweep()
        response = await proxy.http.get(f"/rl/v1/sessions/{session['session_id']}")
        return dict(response.json()) if response.json()["state"] != "open" else None

    return dict(await until(over, "it expires"))


def grow_idle(proxy: Proxy, session: dict[str, Any], seconds: float) -> None:
    """As if nothing had happened for so long."""
    live = proxy.service.sessions.live[session["session_id"]]
    live.active -= seconds
    proxy.service.sessions.watch(live)


async def test_an_idle_session_expires_and_says_so(start: Start) -> None:
    proxy = await start("sessions.idle_timeout=0.05")
    await proxy.admit(10)
    session = await proxy.open()
    info = await expired(proxy, session)
    assert (info["state"], info["reason"][:13]) == ("expired", "idle for 0.05")
    assert info["ended_at"] is not None
    error = refusal(await proxy.call(session["api_key"]), 410, "session_closed", "no heartbeat")
    assert error["state"] == "expired"


async def test_the_ttl_is_absolute(start: Start) -> None:
    proxy = await start("sessions.idle_timeout=1000")
    await proxy.admit(10)
    session = await proxy.open(ttl=0.3)
    path = f"/rl/v1/sessions/{session['session_id']}/heartbeat"
    while (await proxy.post(path, {}, session["api_key"])).status_code == 200:
        await proxy.service.expiry.sweep()
    info = await expired(proxy, session)
    assert (info["state"], info["reason"]) == ("expired", "its ttl ran out")


async def test_what_renews_the_idle_time(proxy: Proxy) -> None:
    session = await proxy.open()
    id, key = session["session_id"], session["api_key"]

    async def idle_in() -> float:
        return float((await proxy.http.get(f"/rl/v1/sessions/{id}")).json()["idle_in"])

    renewing = [
        lambda: proxy.call(key),
        lambda: proxy.post("/rl/v1/set_reward", {"reward": 1}, key),
        lambda: proxy.post("/rl/v1/set_reward", {"final_reward": 1}, key),
        lambda: proxy.post(f"/rl/v1/sessions/{id}/heartbeat", {}, key),
    ]
    for renew in renewing:
        grow_idle(proxy, session, 1000)
        assert await idle_in() <= 800
        assert (await renew()).status_code == 200
        assert await idle_in() > 1700
    # A look does not.
    grow_idle(proxy, session, 1000)
    assert await idle_in() <= 800
    assert await idle_in() <= 800


async def test_a_heartbeat_says_how_long_is_left(proxy: Proxy) -> None:
    session = await proxy.open(ttl=100)
    path = f"/rl/v1/sessions/{session['session_id']}/heartbeat"
    answer = (await proxy.post(path, {}, session["api_key"])).json()
    assert answer["session_id"] == session["session_id"]
    assert 90 < answer["expires_in"] <= 100
    assert 1790 < answer["idle_in"] <= 1800


async def test_a_call_under_way_is_not_idle(proxy: Proxy, engine: ScriptedEngine) -> None:
    session = await proxy.open()
    go = engine.hold(1)
    call = asyncio.create_task(proxy.call(session["api_key"]))
    await until(lambda: engine.running)
    grow_idle(proxy, session, 10_000)
    await proxy.service.expiry.sweep()
    live = proxy.service.sessions.live[session["session_id"]]
    assert live.state is SessionState.OPEN
    go.set()
    assert (await call).status_code == 200
    # Its end renews, too.
    await proxy.service.expiry.sweep()
    assert live.state is SessionState.OPEN
    grow_idle(proxy, session, 10_000)
    assert (await expired(proxy, session))["state"] == "expired"


async def test_an_expiry_aborts_calls_under_way(proxy: Proxy, engine: ScriptedEngine) -> None:
    session = await proxy.open()
    engine.hold(1)
    call = asyncio.create_task(proxy.call(session["api_key"]))
    await until(lambda: engine.running)
    proxy.end_ttl(session)
    assert (await expired(proxy, session))["reason"] == "its ttl ran out"
    assert (await call).status_code == 410
    assert await proxy.recorded(session["session_id"]) == []


async def test_an_expiry_that_cannot_be_written_is_tried_again(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    from any_agent.errors import StoreUnavailable

    session = await proxy.open()

    async def full(*_: Any) -> None:
        raise StoreUnavailable("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(proxy.service.journal, "commit", full)
        proxy.end_ttl(session)
        await proxy.service.expiry.sweep()
        assert session["session_id"] in proxy.service.sessions.live
    assert (await expired(proxy, session))["state"] == "expired"


# -- restarts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [-50_000.0, 50_000.0])
async def test_a_wall_clock_that_is_set_while_the_proxy_is_down(
    start: Start, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    session = await proxy.open(ttl=500)
    waiting = await proxy.open()
    await proxy.complete(waiting["api_key"])
    body = {"await_reward": True, "deadline": 400}
    await proxy.post("/rl/v1/finalize", body, waiting["api_key"])
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + step)
    again = await start()
    await again.service.expiry.sweep()
    info = (await again.http.get(f"/rl/v1/sessions/{session['session_id']}")).json()
    assert (info["state"], 450 < info["expires_in"] <= 500) == ("open", True)
    info = (await again.http.get(f"/rl/v1/sessions/{waiting['session_id']}")).json()
    assert (info["state"], 350 < info["awaits_in"] <= 400) == ("awaiting_reward", True)


async def test_time_goes_on_while_the_proxy_is_down(
    start: Start, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await proxy.open(ttl=500)
    boot = boot_clock.boot_seconds
    monkeypatch.setattr(boot_clock, "boot_seconds", lambda: boot() + 450)
    again = await start()
    path = f"/rl/v1/sessions/{session['session_id']}/heartbeat"
    left = (await again.post(path, {}, session["api_key"])).json()
    assert 0 < left["expires_in"] <= 50
    assert left["idle_in"] > 1790, "nobody could be heard meanwhile"
    monkeypatch.setattr(boot_clock, "boot_seconds", lambda: boot() + 501)
    last = await start()
    assert (await expired(last, session))["reason"] == "its ttl ran out"


def test_after_a_reboot_the_wall_clock_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    row = make_row("s", created_at=time.time() - 30, clock=clock_stamp())
    assert session_age(row) == pytest.approx(0, abs=1)
    monkeypatch.setattr(boot_clock, "boot_id", lambda: "another")
    assert session_age(row) == pytest.approx(30, abs=1)
    monkeypatch.setattr(time, "time", lambda: row.created_at - 100)
    assert session_age(row) == 0, "set back before the opening"


def test_rows_without_a_boot_clock_go_by_the_wall_clock() -> None:
    for stamp in (None, "", " 5.0"):
        row = make_row("s", created_at=time.time() - 30, clock=stamp)
        assert session_age(row) == pytest.approx(30, abs=1)


def test_a_boot_clock_that_began_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    row = make_row("s", created_at=time.time() - 30, clock=clock_stamp())
    monkeypatch.setattr(boot_clock, "boot_seconds", lambda: 0.0)
    assert session_age(row) == pytest.approx(30, abs=1)


# -- the heap --------------------------------------------------------------------------------------


def test_deadlines_come_in_order_and_once() -> None:
    deadlines = DeadlineQueue()
    for at, id in [(3.0, "c"), (1.0, "a"), (2.0, "b"), (9.0, "z")]:
        deadlines.add(id, at)
    deadlines.add("b", 5.0)
    deadlines.add("c", 3.0)
    deadlines.discard("z")
    deadlines.add("never", float("inf"))
    assert deadlines.pop(0.5) == []
    assert deadlines.pop(4.0) == ["a", "c"]
    assert deadlines.pop(100.0) == ["b"]
    assert (deadlines.pop(100.0), len(deadlines)) == ([], 0)


def test_deadlines_against_a_plain_dictionary() -> None:
    generator = random.Random(0)
    deadlines, model, now = DeadlineQueue(), dict[str, float](), 0.0
    for _ in range(20_000):
        id = str(generator.randrange(50))
        match generator.randrange(4):
            case 0:
                now += generator.random()
                due = sorted((at, id) for id, at in model.items() if at <= now)
                assert sorted(deadlines.pop(now)) == sorted(id for _, id in due)
                for _, each in due:
                    del model[each]
            case 1:
                deadlines.discard(id)
                model.pop(id, None)
            case _:
                model[id] = now + generator.randrange(20) / 4
                deadlines.add(id, model[id])
        assert len(deadlines) == len(model)
        assert len(deadlines._heap) <= 2 * len(model) + 1100


async def test_a_sweep_looks_at_none_of_ten_thousand(tmp_path: Path) -> None:
    """Sessions whose time is not over are not touched, also when they are renewed all the time."""
    journal = SQLiteJournal(tmp_path / "j.sqlite")
    sessions = SessionStore(journal, load_config(None, [], {}).sessions, SessionIds(0), rank=0)
    now = time.time()
    rows = [
        make_row(f"s{k}", clock=clock_stamp(), created_at=now, expires_at=now + 3600)
        for k in range(10_000)
    ]
    await journal.commit(*(PutSession(row) for row in rows))
    for row in rows:
        sessions.add(RecordedSession(row, 1800.0))
    for _ in range(3):
        for session in sessions.live.values():
            session.touch()
    assert len(sessions.deadlines) == len(sessions.deadlines._heap) == 10_000
    assert sessions.deadlines.pop(time.monotonic()) == []
    # After half an hour each is looked at once, and set to its new time.
    assert len(sessions.deadlines.pop(time.monotonic() + 1801)) == 10_000
    await journal.close()


async def test_one_that_cannot_be_ended_holds_up_no_other(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is ended itself, once that is possible."""
    proxy = await start("sessions.idle_timeout=0.05")
    await proxy.admit(10)
    sessions = [await proxy.open() for _ in range(3)]
    expire, failures = proxy.service.endings.expire, [RuntimeError("a fault of ours")]

    async def failing(session: RecordedSession, reason: str) -> None:
        if failures:
            raise failures.pop()
        await expire(session, reason)

    monkeypatch.setattr(expiry, "_BATCH", 1)
    monkeypatch.setattr(proxy.service.endings, "expire", failing)
    for session in sessions:
        assert (await expired(proxy, session))["state"] == "expired"
    assert not failures
