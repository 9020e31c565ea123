"""The end of sessions' time: ttl, idle time, heartbeats, and clocks that are set."""

from __future__ import annotations

import asyncio
import pickle
import random
import time
from typing import Any

import pytest

from any_agent.errors import StoreUnavailable
from any_agent.runtime import boot_clock
from any_agent.runtime.boot_clock import clock_stamp
from any_agent.types import SessionState
from proxy_ext.sessions import expiry
from proxy_ext.sessions.indexes import DeadlineQueue
from proxy_ext.sessions.session import RecordedSession, session_age
from tests.proxy_ext.api.test_refusals import refusal
from tests.support.journal import make_row
from tests.support.proxy import Proxy, until
from tests.support.proxy_fixtures import Start
from tests.support.scripted_engine import ScriptedEngine
from tests.support.sessions import awaiting, info, over


def grow_idle(proxy: Proxy, session: dict[str, Any], seconds: float) -> None:
    """As if nothing had happened for so long."""
    live = proxy.service.sessions.live[session["session_id"]]
    live.active -= seconds
    proxy.service.sessions.watch(live)


async def test_an_idle_session_expires_and_a_heartbeat_does_not_prolong_its_ttl(
    start: Start,
) -> None:
    proxy = await start("sessions.idle_timeout=0.05", admit=10)
    session = await proxy.open()
    now = await over(proxy, session)
    assert (now["state"], now["reason"][:13]) == ("expired", "idle for 0.05")
    assert now["ended_at"] is not None
    error = refusal(await proxy.call(session["api_key"]), 410, "session_closed")
    assert error["state"] == "expired"
    proxy = await start("sessions.idle_timeout=1000", admit=10)
    session = await proxy.open(ttl=0.3)
    path = f"/rl/v1/sessions/{session['session_id']}/heartbeat"
    while (await proxy.post(path, {}, session["api_key"])).status_code == 200:
        await proxy.service.expiry.sweep()
    now = await over(proxy, session)
    assert (now["state"], now["reason"]) == ("expired", "its ttl ran out")


async def test_calls_rewards_and_heartbeats_renew_the_idle_time(proxy: Proxy) -> None:
    session = await proxy.open(ttl=100)
    id, key = session["session_id"], session["api_key"]

    async def idle_in() -> float:
        return float((await info(proxy, session))["idle_in"])

    for renew in (
        lambda: proxy.call(key),
        lambda: proxy.post("/rl/v1/set_reward", {"reward": 1}, key),
        lambda: proxy.post("/rl/v1/set_reward", {"final_reward": 1}, key),
        lambda: proxy.post(f"/rl/v1/sessions/{id}/heartbeat", {}, key),
    ):
        grow_idle(proxy, session, 1000)
        assert await idle_in() <= 800
        answer = await renew()
        assert answer.status_code == 200
        assert await idle_in() > 1700
    # A heartbeat says how long is left.
    assert answer.json()["session_id"] == id
    assert 90 < answer.json()["expires_in"] <= 100
    assert 1790 < answer.json()["idle_in"] <= 1800
    # A look does not renew.
    grow_idle(proxy, session, 1000)
    assert await idle_in() <= 800
    assert await idle_in() <= 800


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
    assert (await over(proxy, session))["state"] == "expired"


@pytest.mark.parametrize("step", [-50_000.0, 50_000.0])
async def test_time_goes_on_while_the_proxy_is_down_whatever_the_wall_clock_is_set_to(
    start: Start, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    session = await proxy.open(ttl=500, group_id="g", group_size=2)
    waiting = await awaiting(proxy, 400)
    wall, boot = time.time, boot_clock.boot_seconds
    monkeypatch.setattr(time, "time", lambda: wall() + step)
    again = await start()
    await again.service.expiry.sweep()
    now = await info(again, session)
    assert (now["state"], 450 < now["expires_in"] <= 500) == ("open", True)
    now = await info(again, waiting)
    assert (now["state"], 350 < now["awaits_in"] <= 400) == ("awaiting_reward", True)
    group = again.service.sessions.groups.get("g")
    assert group is not None
    assert group.deadline <= time.monotonic() + again.service.sessions.config.group_timeout
    monkeypatch.setattr(boot_clock, "boot_seconds", lambda: boot() + 450)
    later = await start()
    now = await info(later, session)
    assert 0 < now["expires_in"] <= 50
    assert now["idle_in"] > 1790, "nobody could be heard meanwhile"
    monkeypatch.setattr(boot_clock, "boot_seconds", lambda: boot() + 501)
    assert (await over(await start(), session))["reason"] == "its ttl ran out"


def test_without_the_boots_clock_the_wall_clock_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    for stamp, age in ((clock_stamp(), 0), (None, 30), ("", 30), (" 5.0", 30)):
        row = make_row("s", created_at=now - 30, clock=stamp)
        assert session_age(row) == pytest.approx(age, abs=1), stamp
    row = make_row("s", created_at=now - 30, clock=clock_stamp())
    with monkeypatch.context() as began_anew:
        began_anew.setattr(boot_clock, "boot_seconds", lambda: 0.0)
        assert session_age(row) == pytest.approx(30, abs=1)
    monkeypatch.setattr(boot_clock, "boot_id", lambda: "another")
    assert session_age(row) == pytest.approx(30, abs=1)
    monkeypatch.setattr(time, "time", lambda: row.created_at - 100)
    assert session_age(row) == 0, "set back before the opening"


def test_deadlines_fire_in_order_and_once() -> None:
    """As by a plain dictionary."""
    generator = random.Random(0)
    deadlines, model, now = DeadlineQueue(), dict[str, float](), 0.0
    for _ in range(20_000):
        id = str(generator.randrange(50))
        match generator.randrange(4):
            case 0:
                now += generator.random()
                due = deadlines.pop(now)
                assert sorted(due) == sorted(id for id, at in model.items() if at <= now)
                times = [model.pop(id) for id in due]
                assert times == sorted(times)
            case 1:
                deadlines.discard(id)
                model.pop(id, None)
            case _:
                model[id] = generator.choice((now + generator.randrange(20) / 4, float("inf")))
                deadlines.add(id, model[id])
        assert len(deadlines) == sum(at < float("inf") for at in model.values())
    for k in range(20_000):
        deadlines.add("renewed", now + k)
    assert len(pickle.dumps(deadlines)) < 100_000, "earlier times are dropped"


async def test_a_session_that_cannot_be_ended_holds_up_no_other_expiry(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is ended itself, once that is possible."""
    proxy = await start("sessions.idle_timeout=0.05", admit=10)
    sessions = [await proxy.open() for _ in range(3)]
    expire, failures = (
        proxy.service.endings.expire,
        [
            RuntimeError("a fault of ours"),
            StoreUnavailable("no space left"),
        ],
    )

    async def failing(session: RecordedSession, reason: str) -> None:
        if failures:
            raise failures.pop()
        await expire(session, reason)

    monkeypatch.setattr(expiry, "BATCH", 1)
    monkeypatch.setattr(proxy.service.endings, "expire", failing)
    for session in sessions:
        assert (await over(proxy, session))["state"] == "expired"
    assert not failures
