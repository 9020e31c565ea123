"""A proxy starts while its engine dies, at either side of the moment when it asks for it."""

from __future__ import annotations

import asyncio

import pytest

from any_agent.engine import SGLangEngine
from any_agent.errors import EngineUnavailable
from tests.support.proxy import LIMIT
from tests.support.proxy_fixtures import Start
from tests.support.scripted_engine import ScriptedEngine

context_length = SGLangEngine.context_length


async def test_an_engine_that_died_before_is_waited_for(
    start: Start, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_vain = asyncio.Event()

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


async def test_an_engine_that_dies_then_is_waited_for_by_calls(
    start: Start, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def asked(client: SGLangEngine) -> int:
        known = await context_length(client)
        await engine.die()
        return known

    monkeypatch.setattr(SGLangEngine, "context_length", asked)
    proxy = await start()
    session = await proxy.open(mode="eval")
    call = asyncio.create_task(proxy.call(session["api_key"]))
    await engine.revive()
    async with asyncio.timeout(LIMIT):
        assert (await call).status_code == 200
