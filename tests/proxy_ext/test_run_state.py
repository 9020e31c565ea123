"""An engine that dies, at the start or in a weight update; what a rank then says of its version."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from any_agent.engine import SGLangEngine
from any_agent.engine.model_fingerprint import ModelFingerprint
from any_agent.errors import Conflict, EngineUnavailable
from proxy_ext.__main__ import check_engine
from tests.support.errors import fails_with
from tests.support.proxy import LIMIT, Proxy, until
from tests.support.proxy_fixtures import Start
from tests.support.scripted_engine import ScriptedEngine
from tests.support.sessions import update


async def publish(proxy: Proxy, version: int) -> None:
    await proxy.client.publish_version(version=version, path="x", step=version)


async def told(proxy: Proxy) -> int:
    return int((await proxy.http.get("/rl/v1/version")).json()["version"])


async def test_an_engine_that_died_before_the_start_is_waited_for(
    start: Start, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_vain, context_length = asyncio.Event(), SGLangEngine.context_length

    async def asked(client: SGLangEngine) -> int:
        try:
            return await context_length(client)
        except EngineUnavailable:
            in_vain.set()
            raise

    monkeypatch.setattr(SGLangEngine, "context_length", asked)
    await engine.die()
    starting = asyncio.create_task(start(engine_wait=LIMIT))
    async with asyncio.timeout(LIMIT):
        await in_vain.wait()
        await engine.revive()
        proxy = await starting
    session = await proxy.open(mode="eval")
    assert (await proxy.call(session["api_key"])).status_code == 200


async def test_a_resume_that_fails_is_made_good_when_the_engine_is_back(
    proxy: Proxy, engine: ScriptedEngine
) -> None:
    session = await proxy.open()
    engine.hold(3)
    call = asyncio.create_task(proxy.complete(session["api_key"]))
    await until(lambda: any(len(r.ids) == 3 for r in engine.running.values()))
    await proxy.client.pause(ttl=600)
    # The call gets the tokens that it has, once the engine has ended it.
    await until(lambda: not engine.running)
    await asyncio.sleep(0.2)
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


async def test_an_engine_that_was_away_in_a_pause_resumes(
    proxy: Proxy, engine: ScriptedEngine
) -> None:
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
    monkeypatch.setattr("proxy_ext.run_state.RESUME_INTERVAL", 0.01)
    await proxy.client.pause(ttl=600)
    await engine.die()
    with pytest.raises(EngineUnavailable):
        await proxy.client.resume()
    under_way = asyncio.Event()

    async def resume(_: int) -> None:
        under_way.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as patched:
        patched.setattr(proxy.service.engine, "resume", resume)
        await engine.revive()
        await under_way.wait()
    await proxy.client.pause(ttl=600)
    asked = asyncio.create_task(proxy.complete((await proxy.open())["api_key"]))
    await asyncio.wait({asked}, timeout=0.2)
    assert not asked.done()
    assert proxy.service.engine.paused
    await proxy.client.resume()
    await asked


async def test_weights_that_were_lost_with_the_engine_are_not_told_as_served(
    proxy: Proxy, engine: ScriptedEngine
) -> None:
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
    with fails_with(Conflict, "below 5"):
        await publish(proxy, 4)
    await update(proxy, engine, 5)
    assert await told(proxy) == 5


async def test_an_engine_that_came_back_with_newer_weights_is_told_as_that(
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


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_an_engine_that_lags_is_not_served_under_the_newer_number(
    proxy: Proxy, engine: ScriptedEngine, stream: bool
) -> None:
    """Whoever told of version 5 was wrong; what counts is what the engine says of each token."""
    await proxy.client.pause(ttl=600)
    await publish(proxy, 5)
    # Opened in between, for the version that was told.
    pinned = await proxy.open(mode="eval", version="current")
    await proxy.client.resume()
    assert await told(proxy) == 0
    assert (await proxy.client.run_info()).version == 0
    session = await proxy.open()
    assert session["version"] == 0
    if stream:
        await proxy.stream(session["api_key"])
    else:
        await proxy.complete(session["api_key"])
    (interaction,) = await proxy.recorded(session["session_id"])
    assert set(interaction.output_versions.tolist()) == {0}
    response = await proxy.call(pinned["api_key"], stream=stream)
    assert response.status_code == 409
    assert response.json()["error"]["serving"] == 0
    # Its trainer sees it in what the rank says, and brings the weights again.
    await update(proxy, engine, 5)
    assert (await proxy.call(pinned["api_key"], stream=stream)).status_code == 200


async def test_an_engine_that_is_half_loaded_waits_for_its_trainer(
    start: Start, proxy: Proxy, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its proxy was restarted amid an update, bucket by bucket."""
    monkeypatch.setattr("proxy_ext.run_state.RESUME_INTERVAL", 0.01)
    await proxy.client.pause(ttl=600)
    engine.weight_version = "loading-5"
    shape = ModelFingerprint(100)
    await check_engine(proxy.service.config, engine.url, 0, shape)
    again = await start()
    client = again.service.engine
    await until(lambda: client.paused)
    with fails_with(EngineUnavailable, "half loaded"):
        await again.client.resume()
    assert engine.paused
    assert await told(again) == -1
    engine.weight_version = "5"
    await until(lambda: not client.paused)
    assert not engine.paused
    assert await told(again) == 5


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_an_answer_whose_versions_fall_back_is_not_recorded(
    proxy: Proxy, engine: ScriptedEngine, stream: bool
) -> None:
    """Nothing of an answer is recorded whose versions cannot be."""
    engine.weight_version = "5"
    steps = engine.step()
    session = await proxy.open()
    ask = proxy.stream if stream else proxy.call
    call: asyncio.Task[Any] = asyncio.create_task(ask(session["api_key"]))
    for _ in range(3):
        steps.release()
    await until(lambda: any(len(r.ids) == 3 for r in engine.running.values()))
    engine.weight_version = "4"
    for _ in range(20):
        steps.release()
    answer = await call
    error = answer[0][-1]["error"] if stream else answer.json()["error"]
    assert error["code"] == "engine_mismatch"
    assert "5 to 4" in error["message"]
    assert await proxy.recorded(session["session_id"]) == []


async def test_callers_of_a_service_for_many_see_no_path_of_its_files(
    start: Start, tmp_path: Path
) -> None:
    proxy = await start("server.lane_tag=0badc0de")
    await proxy.client.set_run("finished", step=7, checkpoint=str(tmp_path / "step-00000007"))
    told = await proxy.http.get("/rl/v1/run")
    refused = await proxy.http.post("/rl/v1/start_session", json={})
    assert told.json()["checkpoint"] == "step-00000007"
    assert refused.json()["error"]["run"]["checkpoint"] == "step-00000007"
    assert refused.json()["error"]["message"].startswith("training has ended in ")
    assert str(tmp_path) not in told.text + refused.text
    # The run itself goes on with the whole path.
    assert proxy.service.run.checkpoint == str(tmp_path / "step-00000007")
