"""Several engines as one: which of them a call goes to, and weight updates under calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest

from any_agent.engine import Capabilities, EnginePool, SGLangEngine, agenerate
from any_agent.errors import ConfigError, EngineUnavailable, InvalidRequest
from any_agent.types import ModelRequest, ModelResponse
from tests.support.engine.sglang import FORMULA, request
from tests.support.errors import fails_with
from tests.support.scripted_engine import ScriptedEngine
from tests.support.waiting import until

Engines = list[ScriptedEngine]


@pytest.fixture
async def engines() -> AsyncIterator[Engines]:
    async with AsyncExitStack() as stack:
        engines = [ScriptedEngine(incremental=True) for _ in range(3)]
        for engine in engines:
            await stack.enter_async_context(engine.serve())
        yield engines


@pytest.fixture
async def pool(engines: Engines) -> AsyncIterator[EnginePool]:
    async with pool_of(engines) as pool:
        yield pool


def pool_of(engines: Engines, **options: Any) -> EnginePool:
    return EnginePool([e.url for e in engines], decode=engines[0].decode, **options)


def call(pool: EnginePool, rid: str, **fields: Any) -> asyncio.Task[ModelResponse]:
    return asyncio.create_task(pool.agenerate(request(rid, **fields)))


def counts(engines: Engines) -> list[int]:
    return [len(engine.requests) for engine in engines]


async def test_calls_go_to_the_engine_with_the_fewest(pool: EnginePool, engines: Engines) -> None:
    holds = [engine.hold(1) for engine in engines]
    works = [call(pool, f"first-{k}") for k in range(3)]
    await until(lambda: counts(engines) == [1, 1, 1])
    assert pool.calls == 3
    holds[1].set()
    await until(lambda: pool.calls == 2)
    works.append(call(pool, "next"))
    await until(lambda: counts(engines) == [1, 2, 1])
    for hold in holds:
        hold.set()
    for response in await asyncio.gather(*works):
        assert response.output_ids == FORMULA[:10]
    assert pool.calls == 0


async def test_a_conversation_stays_where_its_beginning_is(
    pool: EnginePool, engines: Engines
) -> None:
    responses = await asyncio.gather(*(pool.agenerate(request("talk")) for _ in range(4)))
    assert [r.output_ids for r in responses] == [FORMULA[:10]] * 4
    assert sorted(counts(engines)) == [0, 0, 4]
    told = next(engine for engine in engines if engine.requests)
    assert len({body["rid"] for body in told.requests}) == 4, "an engine takes an id once at a time"
    for k in range(9):
        await call(pool, f"r{k}")
    assert sorted(counts(engines)) == [3, 3, 7], "idle engines take turns"


async def test_a_conversation_moves_when_its_engine_dies(
    pool: EnginePool, engines: Engines
) -> None:
    await call(pool, "talk")
    home = next(engine for engine in engines if engine.requests)
    home.hold(2)
    under_way = call(pool, "talk")
    await until(lambda: home.running)
    await home.die()
    client = pool.engines[engines.index(home)]
    await until(lambda: client.away)  # type: ignore[attr-defined]
    assert (await call(pool, "talk")).output_ids == FORMULA[:10]
    assert len(home.requests) == 2, "the next turn went to another engine"
    await home.revive()
    # What was under way there has gone on.
    assert (await under_way).output_ids == FORMULA[:10]


async def test_only_so_many_conversations_are_remembered(
    pool: EnginePool, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("any_agent.engine.pool.MAX_REMEMBERED", 1)
    for rid in ("talk", "another", "talk"):
        await call(pool, rid)
    assert counts(engines) == [1, 1, 1]


async def test_a_call_that_is_cancelled_ends_in_the_engine(
    pool: EnginePool, engines: Engines
) -> None:
    for engine in engines:
        engine.hold(3)
    work = call(pool, "left")
    await until(lambda: any(engine.running for engine in engines))
    work.cancel()
    await until(lambda: any(engine.aborted or engine.cancelled for engine in engines))
    assert pool.calls == 0


async def test_a_pool_has_only_the_capabilities_that_all_its_engines_have(engines: Engines) -> None:
    names = Capabilities.names()
    engines[0].told = {"capabilities": names}
    engines[1].told = {"capabilities": [name for name in names if name != "grammar"]}
    engines[2].told = {"capabilities": [name for name in names if name != "min_p"]}
    engines[2].context_length = 512
    for k, engine in enumerate(engines):
        engine.weight_version = str(4 + k)
    async with pool_of(engines) as pool:
        expected = Capabilities(grammar=False, min_p=False, bound_tokens=True)
        assert await pool.capabilities() == expected
        assert (await pool.context_length(), len(pool)) == (512, 3)
        assert pool.version == pool.get_version() == 4, "the oldest that samples"
    for nothing in ((), ("http://x",)):  # the latter without `decode`
        with pytest.raises(ConfigError):
            EnginePool(nothing)


async def test_a_pool_that_is_not_open_or_is_held_answers_nobody(engines: Engines) -> None:
    pool = pool_of(engines, update_wait=0.1)
    assert pool.version == 0
    with fails_with(EngineUnavailable, "not open"):
        await pool.agenerate(request())
    async with pool:
        await pool.agenerate(request())
        await pool.hold()
        with fails_with(EngineUnavailable, "weight update"):
            await pool.agenerate(request())
    with fails_with(EngineUnavailable, "not open"):
        await pool.agenerate(request())
    await engines[2].die()
    with fails_with(EngineUnavailable, "does not answer"):
        async with pool_of(engines):
            pass


async def test_calls_go_on_across_an_update(pool: EnginePool, engines: Engines) -> None:
    for engine in engines:
        engine.hold(4)
    works = [call(pool, f"r{k}") for k in range(3)]
    await until(lambda: all(len(r.ids) == 4 for e in engines for r in e.running.values()))
    await until(lambda: sum(len(e.running) for e in engines) == 3)
    # As the ranks' proxies and the trainer do it: the pool itself tells the engines nothing.
    async with pool_of(engines, update_wait=5.0) as proxies:
        await pool.hold()
        await proxies.pause()
        for engine in engines:
            engine.weight_version = "7"
        late = call(pool, "late")
        await asyncio.sleep(0)
        await proxies.resume(7)
        assert not late.done()
        pool.release(7)
        assert (await late).output_versions == [7] * 10
    for response in await asyncio.gather(*works):
        assert response.output_ids == FORMULA[:10]
        assert response.output_versions == [0] * 4 + [7] * 6
    assert pool.version == 7


async def test_calls_go_on_with_the_old_version_after_a_failed_update(
    pool: EnginePool, engines: Engines
) -> None:
    await pool.hold()
    work = call(pool, "r")
    await until(lambda: pool.calls == 1)
    await asyncio.sleep(0.05)
    assert counts(engines) == [0, 0, 0]
    pool.release(None)
    assert (await work).output_versions == [0] * 10
    assert pool.version == 0


async def test_a_prompt_in_words_needs_somebody_who_writes_ids(
    scripted: ScriptedEngine, client: SGLangEngine
) -> None:
    def write(asked: ModelRequest) -> ModelRequest:
        return replace(asked, prompt=None, input_ids=[7, 8]) if asked.prompt else asked

    ask = ModelRequest(prompt=[{"role": "user", "content": "hi"}])
    async with EnginePool([client]) as pool:
        for engine in (pool, client):
            with fails_with(InvalidRequest, "input_ids="):
                await agenerate(engine, ask)
            with fails_with(InvalidRequest, "RemoteSGLangEngine"):
                await anext(engine.generate(ask, stream=True))
    async with EnginePool([client], write=write) as pool:
        response = await pool.agenerate(ModelRequest(prompt="hi", max_tokens=2))
    assert response.input_tokens == scripted.requests[-1]["input_ids"] == [7, 8]
