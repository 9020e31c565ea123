"""Whoever is turned away is told when to come again: each place where that happens, over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from any_agent.errors import TooManyRequests
from proxy_ext.calls.concurrency_limit import CallOwner, ConcurrencyLimit
from tests.proxy_ext.api.test_refusals import refusal
from tests.proxy_ext.test_metrics import scrape
from tests.support.errors import fails_with
from tests.support.proxy import HELLO, Proxy, turned_away, until
from tests.support.proxy_fixtures import Start
from tests.support.retries import Agent
from tests.support.scripted_engine import ScriptedEngine
from tests.support.sessions import abort, finalize


@asynccontextmanager
async def held_calls(
    proxy: Proxy, engine: ScriptedEngine, keys: list[str], **fields: Any
) -> AsyncIterator[list[asyncio.Task[httpx.Response]]]:
    """One call of each key that the engine does not answer until the context ends."""
    before = len(engine.running)
    events = [engine.hold(1) for _ in keys]
    calls = [asyncio.create_task(proxy.call(key, **fields)) for key in keys]
    try:
        await until(lambda: len(engine.running) == before + len(keys))
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
        assert proxy.service.calls.concurrency.limit == 4
        keys = [(await proxy.open(mode="eval"))["api_key"] for _ in range(5)]
        async with held_calls(proxy, small, keys[:4]) as calls:
            # A refused call costs nothing, not even a look at its body.
            garbage = await proxy.post("/v1/chat/completions", b"{" * 100, keys[4])
            turned_away(garbage, 429, "too_many_calls")
            assert small.most_running == 4
        assert [call.result().status_code for call in calls] == [200] * 4
        await until(lambda: proxy.service.calls.concurrency.in_use == 0)
        await proxy.complete(keys[4])
        shown = await scrape(proxy)
        assert shown("any_agent_calls_limit") == 4
        assert shown("any_agent_calls_refused_total") == 1


async def test_the_limit_of_calls_follows_the_engine_and_the_settings(
    start: Start, engine: ScriptedEngine
) -> None:
    for slots, settings, limit in (
        (None, (), 1024),
        (4, ("server.max_inflight_calls=5", "rollout.max_concurrent=64"), 5),
        (4, ("rollout.max_concurrent=64",), 64),
        (4, ("rollout.max_concurrent=8",), 8),
        (600, ("rollout.max_concurrent=8",), 1024),
    ):
        engine.slots = slots
        found = (await start(*settings)).service.calls.concurrency.limit
        assert found == limit, (slots, settings)


async def test_every_way_out_of_a_call_gives_its_place_back(
    start: Start, engine: ScriptedEngine
) -> None:
    proxy = await start("server.max_inflight_calls=2", "server.retry_grace=0.1")
    places = proxy.service.calls.concurrency
    session = await proxy.open(mode="eval")
    key = session["api_key"]
    await proxy.complete(key)
    await proxy.stream(key)
    assert (await proxy.call("sk-v1.0.wrong")).status_code == 401
    assert (await proxy.call(key, n=3)).status_code == 400
    assert (await proxy.post("/v1/chat/completions", b"no json", key)).status_code == 400
    engine.fail("status")
    assert (await proxy.call(key)).status_code == 503
    await until(lambda: places.in_use == 0)
    for stream in (False, True):
        agent = Agent(proxy, engine, session, stream=stream)
        # Its client leaves. One whose SDK marks retries has a while to come again.
        for count in (None, 0):
            event = engine.hold(1)
            await agent.leave(count)
            await until(lambda: places.in_use == 0)
            event.set()
    # The engine may learn a moment later that a client has left.
    await until(lambda: not engine.running)
    async with held_calls(proxy, engine, [key]):
        assert places.in_use == 1
        await finalize(proxy, session)
        await until(lambda: places.in_use == 0)


async def test_a_session_gets_half_of_the_slots_while_others_call(
    start: Start, engine: ScriptedEngine
) -> None:
    proxy = await start("server.max_inflight_calls=4")
    greedy, modest = [(await proxy.open(mode="eval"))["api_key"] for _ in range(2)]
    await proxy.complete(modest)
    async with held_calls(proxy, engine, [greedy] * 2):
        refusal(await proxy.call(greedy), 429, "too_many_calls", "this session has 2 of the 4")
        async with held_calls(proxy, engine, [modest] * 2):
            # The others fill the rest, and then there is none.
            refusal(await proxy.call(modest), 429, "too_many_calls", "this rank has 4")
    await until(lambda: proxy.service.calls.concurrency.in_use == 0)


def owned(*owners: CallOwner, limit: int = 4) -> tuple[ConcurrencyLimit, list[float]]:
    """Slots at a time that the test sets, with a call of each owner under way."""
    now = [1000.0]
    slots = ConcurrencyLimit(limit, lambda: now[0])
    for owner in owners:
        slots.require_free(owner)
        slots.acquire(owner)
    return slots, now


ALICE, BOB = CallOwner("a", "alice"), CallOwner("b", "bob")


def test_a_lone_session_gets_every_slot() -> None:
    slots, now = owned(ALICE, ALICE, ALICE, ALICE)
    assert slots.in_use == 4
    with fails_with(TooManyRequests, "this rank has 4"):
        slots.require_free(BOB)
    # From now on another one calls, too, and gets what is given back.
    slots.free(1, ALICE)
    with fails_with(TooManyRequests, "this session has 3"):
        slots.require_free(ALICE)
    slots.require_free(BOB)
    slots.acquire(BOB)
    slots.free(1, BOB)
    now[0] += 61
    slots.acquire(ALICE)


def test_sessions_of_one_tenant_share_its_slots() -> None:
    sessions = [CallOwner(f"s{k}", "alice") for k in range(4)]
    slots, _ = owned(BOB, *sessions[:2])
    with fails_with(TooManyRequests, "this tenant has 2"):
        slots.acquire(sessions[2])
    slots.free(1, BOB)
    with fails_with(TooManyRequests, "this tenant has 2"):
        slots.acquire(sessions[2])
    # The operator's sessions belong to no tenant.
    slots.acquire(CallOwner("s9"))
    slots.acquire(CallOwner("s8"))


def test_each_choice_of_a_call_counts_as_a_slot_of_its_session() -> None:
    slots, _ = owned(BOB)
    slots.free(1, BOB)
    slot = slots.acquire(ALICE)
    slot.grow(3)
    assert slots.in_use == 3
    with fails_with(TooManyRequests, "this session has 3"):
        slots.acquire(ALICE)
    slots.acquire(BOB)
    slot.release()
    assert slots.in_use == 1
    slots.acquire(ALICE)


async def test_sessions_that_are_open_are_bounded(start: Start) -> None:
    proxy, start_session = await start("sessions.max_open=2"), "/rl/v1/start_session"
    session = await proxy.open(mode="eval")
    await proxy.open(mode="eval")
    again = await start("sessions.max_open=2")
    for each in (proxy, again):
        refused = await each.post(start_session, {"mode": "eval"})
        turned_away(refused, 429, "too_many_sessions")
    await abort(again, session)
    await again.open(mode="eval")


async def test_a_draining_proxy_turns_calls_and_opens_away(proxy: Proxy) -> None:
    key = (await proxy.open(mode="eval"))["api_key"]
    await proxy.service.drain()
    turned_away(await proxy.call(key), 503, "draining")
    turned_away(await proxy.post("/rl/v1/start_session", {}), 503, "draining")


async def test_too_many_requests_or_bytes_at_once_are_turned_away(
    proxy: Proxy, engine: ScriptedEngine
) -> None:
    bounds = proxy.front.limits
    keys = [(await proxy.open(mode="eval"))["api_key"] for _ in range(2)]
    bounds.max_requests = 0
    turned_away(await proxy.http.get("/healthz"), 503, "too_many_requests")
    bounds.max_requests, bounds.max_bytes = 10, 50_000
    long = [{"role": "system", "content": " " * 40_000}, *HELLO]
    alone = await proxy.call(keys[0], long)
    assert alone.status_code in (200, 400), alone.text
    async with held_calls(proxy, engine, keys[:1]):
        assert 0 < bounds.bytes < 1000
        bounds.max_bytes = 1000
        turned_away(await proxy.call(keys[1], long), 503, "too_many_bytes")
    await until(lambda: bounds.requests == 0 and bounds.bytes == 0)


async def test_one_key_leaves_requests_and_bytes_for_others(
    proxy: Proxy, engine: ScriptedEngine
) -> None:
    bounds = proxy.front.limits
    keys = [(await proxy.open(mode="eval"))["api_key"] for _ in range(2)]
    bounds.max_requests, bytes_before = 4, bounds.max_bytes
    async with held_calls(proxy, engine, [keys[0]] * 3):
        # Alone it gets more than its half, but not all.
        turned_away(await proxy.call(keys[0]), 429, "too_many_of_key")
        await proxy.complete(keys[1])
        bounds.max_requests, bounds.max_bytes = 8192, 4 * bounds.bytes // 3
        turned_away(await proxy.call(keys[0]), 429, "too_many_of_key")
        await proxy.complete(keys[1])
        # The operator's own requests belong to no key.
        assert (await proxy.http.get("/rl/v1/sessions")).status_code == 200
    await until(lambda: bounds.requests == 0 and bounds.bytes == 0)
    assert not bounds.held
    bounds.max_requests, bounds.max_bytes = 8, bytes_before
    # The reserve is another key's, up to its own half.
    async with held_calls(proxy, engine, [keys[0]] * 6), held_calls(proxy, engine, [keys[1]]):
        turned_away(await proxy.call(keys[0]), 429, "too_many_of_key")
        await proxy.complete(keys[1])
