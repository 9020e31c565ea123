"""Whoever is turned away is told when to come again: each place where that happens, over HTTP."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest

from any_agent.access import run_dir_of
from any_agent.errors import StoreBusy, StoreFull
from any_agent.keystore import TenantLimits, create_key
from proxy_ext.journal import Statement
from tests.fakes.scripted_engine import ScriptedEngine
from tests.proxy_ext.conftest import Start
from tests.proxy_ext.proxy_lab import HELLO, LIMIT, Proxy, until

ADMIN = "server.admin_key=operator-secret-4711"


def turned_away(response: httpx.Response, status: int, code: str) -> int:
    """Check a refusal; the seconds until the next try."""
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert status in (429, 503, 507)
    seconds = int(response.headers["Retry-After"])
    assert 1 <= seconds <= 60
    return seconds


async def open_raw(proxy: Proxy, **fields: Any) -> httpx.Response:
    return await proxy.post("/rl/v1/start_session", fields)


# -- calls -----------------------------------------------------------------------------------------


@asynccontextmanager
async def held_calls(
    proxy: Proxy, engine: ScriptedEngine, keys: list[str], **fields: Any
) -> AsyncIterator[list[asyncio.Task[httpx.Response]]]:
    """One call of each key that the engine does not answer until the context ends."""
    events = [engine.hold(1) for _ in keys]
    calls = [asyncio.create_task(proxy.call(key, **fields)) for key in keys]
    try:
        await until(lambda: len(engine.running) == len(keys))
        yield calls
    finally:
        for event in events:
            event.set()
        await asyncio.wait(calls)


async def test_calls_are_bounded_by_what_the_engine_samples_at_once(
    start: Start, engine: ScriptedEngine
) -> None:
    small = ScriptedEngine(decode=engine.decode, slots=2)
    async with small.serve() as url:
        proxy = await start("rollout.max_concurrent=3", engine_url=url)
        assert proxy.service.calls.places.limit == 4
        keys = [(await proxy.open(mode="eval"))["api_key"] for _ in range(5)]
        async with held_calls(proxy, small, keys[:4]) as calls:
            turned_away(await proxy.call(keys[4]), 429, "too_many_calls")
            assert small.most_running == 4
        assert [call.result().status_code for call in calls] == [200] * 4
        await until(lambda: proxy.service.calls.places.taken == 0)
        await proxy.complete(keys[4])
        shown = (await proxy.http.get("/metrics")).text
        assert 'any_agent_calls_limit{rank="0"} 4' in shown
        assert 'any_agent_calls_refused_total{rank="0"} 1' in shown


@pytest.mark.parametrize(
    "slots, settings, limit",
    [
        (None, (), 1024),
        (4, ("server.max_inflight_calls=5", "rollout.max_concurrent=64"), 5),
        (4, ("rollout.max_concurrent=64",), 64),
        (4, ("rollout.max_concurrent=8",), 8),
        (600, ("rollout.max_concurrent=8",), 1024),
    ],
)
async def test_how_many_calls_are_taken(
    start: Start, engine: ScriptedEngine, slots: int | None, settings: tuple[str, ...], limit: int
) -> None:
    engine.slots = slots
    assert (await start(*settings)).service.calls.places.limit == limit


async def test_every_way_out_of_a_call_gives_its_place_back(
    start: Start, engine: ScriptedEngine
) -> None:
    proxy = await start("server.max_inflight_calls=2", "server.retry_grace=0.1")
    places = proxy.service.calls.places
    key = (await proxy.open(mode="eval"))["api_key"]
    await proxy.complete(key)
    await proxy.stream(key)
    assert (await proxy.call("sk-v1.0.wrong")).status_code == 401
    assert (await proxy.call(key, n=2)).status_code == 400
    assert (await proxy.post("/v1/chat/completions", b"no json", key)).status_code == 400
    engine.fail("status")
    assert (await proxy.call(key)).status_code == 503
    await until(lambda: places.taken == 0)
    for marked in ({}, {"x-stainless-retry-count": "0"}):
        for stream in (False, True):
            # Its client leaves. One whose SDK marks retries has a while to come again.
            event = engine.hold(1)
            body = {"model": "m", "messages": HELLO, "max_tokens": 4, "stream": stream}
            headers = {"Authorization": f"Bearer {key}", **marked}
            with pytest.raises(httpx.ReadTimeout):
                async with proxy.http.stream(
                    "POST", "/v1/chat/completions", json=body, headers=headers, timeout=0.3
                ) as response:
                    await response.aread()
            await until(lambda: places.taken == 0)
            event.set()
    first = await proxy.open(mode="eval")
    async with held_calls(proxy, engine, [first["api_key"]]):
        assert places.taken == 1
        await proxy.post("/rl/v1/finalize", {}, first["api_key"])
        await until(lambda: places.taken == 0)


async def test_a_refused_call_costs_nothing(start: Start, engine: ScriptedEngine) -> None:
    """Not even a look at its body."""
    proxy = await start("server.max_inflight_calls=1")
    keys = [(await proxy.open(mode="eval"))["api_key"] for _ in range(2)]
    async with held_calls(proxy, engine, keys[:1]):
        garbage = await proxy.post("/v1/chat/completions", b"{" * 100, keys[1])
        turned_away(garbage, 429, "too_many_calls")


async def test_an_engine_that_refuses_or_is_away(start: Start, engine: ScriptedEngine) -> None:
    proxy = await start("engine.update_wait=0.2")
    key = (await proxy.open(mode="eval"))["api_key"]
    engine.fail("status", status=503)
    turned_away(await proxy.call(key), 503, "engine_unavailable")
    await proxy.http.post("/rl/v1/pause", json={"ttl": 30})
    turned_away(await proxy.call(key), 503, "engine_unavailable")
    await proxy.http.post("/rl/v1/resume", json={})
    await proxy.complete(key)
    await engine.die()
    turned_away(await proxy.call(key), 503, "engine_unavailable")
    turned_away(await proxy.http.get("/readyz"), 503, "engine_unavailable")


# -- opens -----------------------------------------------------------------------------------------


async def test_opens_without_a_slot_or_a_place_in_the_queue(start: Start) -> None:
    proxy = await start("sessions.max_waiting=2", "sessions.max_wait=0.2")
    turned_away(await open_raw(proxy), 429, "no_capacity")
    turned_away(await open_raw(proxy, task_id="t", wait=0.05), 429, "no_capacity")
    answers = await asyncio.gather(*(open_raw(proxy, wait=60) for _ in range(4)))
    for answer in answers:
        turned_away(answer, 429, "no_capacity")
    said = [answer.json()["error"]["message"] for answer in answers]
    assert sum("too many sessions wait" in text for text in said) == 2
    assert (await proxy.capacity())["waiting"] == 0


async def test_sessions_that_are_open_are_bounded(start: Start) -> None:
    proxy = await start("sessions.max_open=2")
    session = await proxy.open(mode="eval")
    await proxy.open(mode="eval")
    turned_away(await open_raw(proxy, mode="eval"), 429, "too_many_sessions")
    again = await start("sessions.max_open=2")
    turned_away(await open_raw(again, mode="eval"), 429, "too_many_sessions")
    await again.post(f"/rl/v1/sessions/{session['session_id']}/abort", {}, session["api_key"])
    await again.open(mode="eval")


# -- the store, the process, what stands in front --------------------------------------------------


@pytest.mark.parametrize(
    "error, status, code",
    [
        (StoreBusy("too many writes wait"), 503, "store_busy"),
        (StoreFull("no space left"), 507, "store_full"),
    ],
)
async def test_a_store_that_takes_nothing(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int, code: str
) -> None:
    session = await proxy.open(mode="eval")
    key = session["api_key"]
    await proxy.complete(key)
    done = await proxy.open(mode="eval")
    await proxy.complete(done["api_key"])

    async def refuse(*_: Statement) -> None:
        raise error

    monkeypatch.setattr(proxy.service.journal, "commit", refuse)
    turned_away(await open_raw(proxy, mode="eval"), status, code)
    turned_away(await open_raw(proxy), status, code)
    turned_away(await proxy.call(key), status, code)
    turned_away(await proxy.post("/rl/v1/set_reward", {"reward": 1}, key), status, code)
    turned_away(await proxy.post("/rl/v1/finalize", {"final_reward": 1}, key), status, code)
    path = f"/rl/v1/sessions/{session['session_id']}"
    turned_away(await proxy.post(f"{path}/abort", {}, key), status, code)
    await until(lambda: proxy.service.calls.places.taken == 0)
    monkeypatch.undo()
    await proxy.complete(key)
    assert (await proxy.capacity())["reserved"] == 0, "the slot was given back"


async def test_a_proxy_that_stops(proxy: Proxy) -> None:
    key = (await proxy.open(mode="eval"))["api_key"]
    await proxy.service.drain()
    turned_away(await proxy.call(key), 503, "draining")
    turned_away(await open_raw(proxy), 503, "draining")


async def test_too_many_requests_at_once(proxy: Proxy) -> None:
    bounds = proxy.front.bounds
    bounds.most_requests = 0
    turned_away(await proxy.http.get("/healthz"), 503, "too_many_requests")
    bounds.most_requests = 10
    assert (await proxy.http.get("/healthz")).status_code == 200
    assert bounds.requests == 0


async def test_too_many_bytes_at_once(proxy: Proxy, engine: ScriptedEngine) -> None:
    bounds = proxy.front.bounds
    bounds.most_bytes = 50_000
    keys = [(await proxy.open(mode="eval"))["api_key"] for _ in range(2)]
    long = [{"role": "system", "content": " " * 40_000}, *HELLO]
    alone = await proxy.call(keys[0], long)
    assert alone.status_code in (200, 400), alone.text
    async with held_calls(proxy, engine, keys[:1]):
        assert 0 < bounds.bytes < 1000
        bounds.most_bytes = 1000
        turned_away(await proxy.call(keys[1], long), 503, "too_many_bytes")
    await until(lambda: bounds.requests == 0 and bounds.bytes == 0)


# -- tenants ---------------------------------------------------------------------------------------


class Tenants:
    """Keys of tenants at one proxy."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy

    def key(self, tenant: str, **limits: float) -> str:
        path = run_dir_of(self.proxy.service.config).keys
        made = TenantLimits.model_validate(limits)
        key = create_key(path, "tenant", tenant=tenant, limits=made)[0]
        # A proxy that has just looked does not look again for a moment.
        assert self.proxy.service.auth.access._kept.get(within=0.0).find(key)
        return key

    async def open(self, key: str, **fields: Any) -> httpx.Response:
        body = {"mode": "eval", **fields}
        return await self.proxy.post("/rl/v1/start_session", body, key)


Refusable = Callable[[], Awaitable[httpx.Response]]


async def exhausted(ask: Refusable, most: int = 50) -> tuple[int, httpx.Response]:
    """How often it went well, and the refusal."""
    for number in range(most):
        response = await ask()
        if response.status_code != 200:
            return number, response
    raise AssertionError("it never ended")


async def test_open_sessions_of_a_tenant(start: Start) -> None:
    proxy = await start(ADMIN, "server.tenant_open_sessions=4", "server.ranks=1")
    tenants = Tenants(proxy)
    alice, bob = tenants.key("alice", open_sessions=2), tenants.key("bob")
    first = (await tenants.open(alice)).json()
    await tenants.open(alice)
    refused = await tenants.open(alice)
    turned_away(refused, 429, "quota_exceeded")
    assert refused.json()["error"]["quota"] == "open_sessions"
    for _ in range(4):
        assert (await tenants.open(bob)).status_code == 200
    turned_away(await tenants.open(bob), 429, "quota_exceeded")
    for _ in range(5):
        await proxy.open(mode="eval")
    again = await start(ADMIN, "server.ranks=1")
    tenants = Tenants(again)
    turned_away(await tenants.open(alice), 429, "quota_exceeded")
    response = await again.post("/rl/v1/finalize", {"await_reward": True}, first["api_key"])
    assert response.status_code == 200
    # It holds what it held until its reward is there.
    turned_away(await tenants.open(alice), 429, "quota_exceeded")
    await again.post("/rl/v1/finalize", {}, alice, **{"x-any-agent-session": first["session_id"]})
    assert (await tenants.open(alice)).status_code == 200


async def test_an_open_that_waits_counts_and_holds_nobody_up(start: Start) -> None:
    proxy = await start(ADMIN, "server.ranks=1", "sessions.max_waiting=3")
    tenants = Tenants(proxy)
    alice, bob = tenants.key("alice", open_sessions=2), tenants.key("bob")
    waits = [asyncio.create_task(tenants.open(alice, mode="train", wait=LIMIT)) for _ in range(2)]
    await until(lambda: proxy.service.sessions.admission.waiting == 2)
    turned_away(await tenants.open(alice, mode="train", wait=LIMIT), 429, "quota_exceeded")
    third = asyncio.create_task(tenants.open(bob, mode="train", wait=LIMIT))
    await until(lambda: proxy.service.sessions.admission.waiting == 3)
    await proxy.admit(3)
    assert [(await task).status_code for task in (*waits, third)] == [200] * 3


async def test_requests_of_a_tenant_and_of_its_sessions(start: Start) -> None:
    proxy = await start(ADMIN, "server.ranks=1")
    tenants = Tenants(proxy)
    # So slow that the test does not meet a refill.
    alice, bob = tenants.key("alice", requests_per_second=0.9), tenants.key("bob")
    started = await tenants.open(alice)
    key = started.json()["api_key"]
    number, refused = await exhausted(lambda: proxy.call(key))
    assert 3 <= number <= 10
    assert refused.json()["error"]["quota"] == "requests_per_second"
    turned_away(refused, 429, "quota_exceeded")
    for ask in (
        lambda: proxy.post("/rl/v1/set_reward", {"reward": 1}, key),
        lambda: proxy.http.get("/rl/v1/sessions", headers={"authorization": f"Bearer {alice}"}),
        lambda: tenants.open(alice),
    ):
        _, refused = await exhausted(ask)
        turned_away(refused, 429, "quota_exceeded")
    other = (await tenants.open(bob)).json()["api_key"]
    for _ in range(20):
        assert (await proxy.call(other)).status_code == 200
    shown = (await proxy.http.get("/metrics")).text
    counted = re.search(
        r'quotas_exceeded_total{rank="0",quota="requests_per_second"} (\d+)'
        r'|quotas_exceeded_total{quota="requests_per_second",rank="0"} (\d+)',
        shown,
    )
    assert counted is not None and int(counted[1] or counted[2]) == 4


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_of_a_tenant(start: Start, stream: bool) -> None:
    proxy = await start(ADMIN, "server.ranks=1")
    tenants = Tenants(proxy)
    alice = tenants.key("alice", tokens_per_second=1)
    key = (await tenants.open(alice)).json()["api_key"]
    assert (await proxy.call(key, stream=stream)).status_code == 200
    await until(lambda: proxy.service.calls.places.taken == 0)
    quotas = proxy.service.quotas
    (bucket,) = (b for (quota, _), b in quotas._buckets.items() if quota == "tokens_per_second")
    (session,) = proxy.service.sessions.live.values()
    (interaction,) = session.tree
    used = len(session.tree.prompt_ids(interaction.id)) + len(interaction.output_ids)
    # It was full, at five seconds' worth, and refills since.
    assert used > 20 and 5 - used <= bucket._level < 5
    refused = await proxy.call(key)
    assert refused.json()["error"]["quota"] == "tokens_per_second"
    turned_away(refused, 429, "quota_exceeded")
    # What costs no tokens goes on.
    assert (await proxy.post("/rl/v1/set_reward", {"reward": 1}, key)).status_code == 200


async def test_a_tenant_at_its_quota_does_not_starve_another(
    start: Start, engine: ScriptedEngine
) -> None:
    """It asks as fast as it can, at a rank with few places; the other one is always let in."""
    proxy = await start(ADMIN, "server.ranks=1", "server.max_inflight_calls=2")
    tenants = Tenants(proxy)
    alice, bob = tenants.key("alice", requests_per_second=1), tenants.key("bob")
    greedy = (await tenants.open(alice)).json()["api_key"]
    modest = (await tenants.open(bob)).json()["api_key"]
    over, said = False, []

    async def hammer() -> None:
        while not over:
            said.append((await proxy.call(greedy)).status_code)

    async with AsyncExitStack() as stack:
        hammering = asyncio.create_task(hammer())
        stack.callback(hammering.cancel)
        await until(lambda: said.count(429) > 5)
        for _ in range(20):
            assert (await proxy.call(modest)).status_code == 200
        over = True
        await hammering
    assert said.count(429) > len(said) / 2
