"""Eval sessions: outside training's capacity, and pinned to one weight version on request."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.proxy_ext.api.test_refusals import refusal
from tests.support.proxy import Proxy, until
from tests.support.proxy_fixtures import Start
from tests.support.retries import Agent
from tests.support.scripted_engine import ScriptedEngine
from tests.support.sessions import finalize, info, update


async def pinned(proxy: Proxy, version: Any = "current") -> dict[str, Any]:
    return await proxy.open(mode="eval", version=version)


async def test_an_open_that_pins_another_version_is_refused(proxy: Proxy) -> None:
    response = await proxy.post("/rl/v1/start_session", {"mode": "eval", "version": 7})
    error = refusal(response, 409, "version_gone")
    assert (error["pinned"], error["serving"]) == (7, 0)
    bad: list[dict[str, Any]] = [{"version": 0}, {"version": "current"}]
    for body in (*bad, *({"mode": "eval", "version": v} for v in (-1, "newest"))):
        response = await proxy.post("/rl/v1/start_session", body)
        refusal(response, 400, "invalid_request")
    assert proxy.service.sessions.counts.created == {}


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_of_a_pinned_session_are_refused_after_an_update(
    proxy: Proxy, engine: ScriptedEngine, stream: bool
) -> None:
    session, free = await pinned(proxy), await proxy.open(mode="eval")
    assert (await proxy.call(session["api_key"], stream=stream)).status_code == 200
    await update(proxy, engine, 1)
    asked = len(engine.requests)
    response = await proxy.call(session["api_key"], stream=stream)
    refusal(response, 409, "version_gone")
    assert len(engine.requests) == asked, "the engine is not even asked"
    assert (await proxy.call(free["api_key"], stream=stream)).status_code == 200
    # What it has can still be rewarded and finalized.
    assert (await finalize(proxy, session, final_reward=1))["state"] == "evaluated"


async def test_a_pinned_call_that_an_update_cuts_off_is_refused_and_untrainable(
    proxy: Proxy, engine: ScriptedEngine
) -> None:
    session = await pinned(proxy)
    go = engine.hold(3)
    agent = Agent(proxy, engine, session)
    call = agent.begin(0)
    await until(lambda: engine.running)
    await update(proxy, engine, 1)
    go.set()
    refusal(await call, 409, "version_gone")
    (recorded,) = await agent.recorded()
    assert (recorded.untrainable_reason, recorded.finish_reason) == ("version_gone", "abort")
    assert set(recorded.output_versions.tolist()) == {0, 1}
    assert not proxy.service.sessions.live[session["session_id"]].calls
    # A marked retry does not get it either.
    refusal(await agent.ask(1), 409, "version_gone")


async def test_a_pinned_stream_that_an_update_cuts_off_ends_with_an_error(
    proxy: Proxy, engine: ScriptedEngine
) -> None:
    session = await pinned(proxy)
    go = engine.hold(3)
    streaming = asyncio.create_task(proxy.stream(session["api_key"]))
    await until(lambda: engine.running)
    await update(proxy, engine, 1)
    go.set()
    events, done = await streaming
    assert not done
    assert events[-1]["error"]["code"] == "version_gone"
    assert not any(c.get("finish_reason") for e in events[:-1] for c in e["choices"])
    (recorded,) = await proxy.recorded(session["session_id"])
    assert recorded.untrainable_reason == "version_gone"


async def test_a_pinned_call_that_waits_out_an_update_is_refused_unrecorded(
    proxy: Proxy, engine: ScriptedEngine
) -> None:
    """It was let in before, and nothing was sampled of it."""
    session = await pinned(proxy)
    await proxy.client.pause(ttl=60)
    call = asyncio.create_task(proxy.call(session["api_key"]))
    await until(lambda: len(proxy.service.calls) == 1)
    engine.weight_version = "1"
    await proxy.client.publish_version(version=1, path="/w", step=1)
    await proxy.client.resume()
    refusal(await call, 409, "version_gone")
    assert await proxy.recorded(session["session_id"]) == []


async def test_calls_under_the_pinned_version_are_answered_after_a_restart_too(
    start: Start, proxy: Proxy, engine: ScriptedEngine
) -> None:
    await update(proxy, engine, 3)
    session = await pinned(proxy, 3)
    assert session["version"] == 3
    again = await start()
    assert (await again.call(session["api_key"])).status_code == 200
    now = await info(again, session)
    assert (now["pinned_version"], now["first_version"], now["last_version"]) == (3, 3, 3)
    engine.weight_version = "4"
    last = await start()
    refusal(await last.call(session["api_key"]), 409, "version_gone")
