"""Weight updates on an engine that dies, and what a rank then says of its version."""

from __future__ import annotations

import asyncio

import pytest

from any_agent.errors import Conflict, EngineUnavailable
from tests.fakes.scripted_engine import ScriptedEngine
from tests.proxy_ext.proxy_lab import Proxy, until


async def publish(proxy: Proxy, version: int) -> None:
    await proxy.client.publish_version(version=version, path="x", step=version)


async def told(proxy: Proxy) -> int:
    return int((await proxy.http.get("/rl/v1/version")).json()["version"])


async def test_a_resume_that_fails_is_made_good_when_the_engine_is_back(
    proxy: Proxy, engine: ScriptedEngine
) -> None:
    session = await proxy.open()
    engine.hold(3)
    call = asyncio.create_task(proxy.complete(session["api_key"]))
    await until(lambda: any(len(r.ids) == 3 for r in engine.running.values()))
    await proxy.client.pause(ttl=600)
    await engine.die()
    with pytest.raises(EngineUnavailable):
        await proxy.client.resume()
    assert proxy.service.engine.paused
    await engine.revive("2")
    # Its trainer need not come back for that.
    await asyncio.wait_for(call, 60)
    (interaction,) = await proxy.recorded(session["session_id"])
    assert interaction.output_versions.tolist() == [0] * 3 + [2] * 5
    assert await told(proxy) == 2


async def test_a_pause_of_an_engine_that_is_away(proxy: Proxy, engine: ScriptedEngine) -> None:
    await engine.die()
    with pytest.raises(EngineUnavailable):
        await proxy.client.pause(ttl=600)
    # As a trainer does after whatever failed.
    with pytest.raises(EngineUnavailable):
        await proxy.client.resume()
    await engine.revive()
    await until(lambda: not proxy.service.engine.paused)
    assert engine.pauses == []


async def test_a_pause_after_a_failed_resume_holds(
    proxy: Proxy, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy_ext.run_state._RESUME_EVERY", 0.01)
    await proxy.client.pause(ttl=600)
    await engine.die()
    with pytest.raises(EngineUnavailable):
        await proxy.client.resume()
    await engine.revive()
    await proxy.client.pause(ttl=600)
    asked = asyncio.create_task(proxy.complete((await proxy.open())["api_key"]))
    await asyncio.wait({asked}, timeout=0.2)
    assert not asked.done()
    assert proxy.service.engine.paused
    await proxy.client.resume()
    await asked


async def test_weights_that_were_lost_with_the_engine(proxy: Proxy, engine: ScriptedEngine) -> None:
    """It loaded version 5, died before it was resumed, and came back with 4."""
    await proxy.client.pause(ttl=600)
    engine.weight_version = "5"
    await publish(proxy, 5)
    assert await told(proxy) == 5
    await engine.die()
    await engine.revive("4")
    await proxy.client.resume()
    assert await told(proxy) == 4
    assert (await proxy.open())["version"] == 4
    with pytest.raises(Conflict, match="below 5; versions only grow"):
        await publish(proxy, 4)
    await proxy.client.pause(ttl=600)
    engine.weight_version = "5"
    await publish(proxy, 5)
    await proxy.client.resume()
    assert await told(proxy) == 5


async def test_an_engine_that_came_back_with_newer_weights(
    proxy: Proxy, engine: ScriptedEngine
) -> None:
    """They were published to disk, and the trainer has not told of them yet."""
    session = await proxy.open()
    await engine.die()
    await engine.revive("6")
    await proxy.complete(session["api_key"])
    assert await told(proxy) == 6
    with pytest.raises(Conflict):
        await publish(proxy, 5)
    await publish(proxy, 6)
