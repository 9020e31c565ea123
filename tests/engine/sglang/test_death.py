"""The engine's death under calls: they wait for it and go on with what they have."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from any_agent.engine import SGLangEngine
from any_agent.errors import EngineUnavailable
from any_agent.types import ModelRequest
from tests.support.engine.sglang import (
    FORMULA,
    PROMPT,
    Work,
    all_of,
    ask,
    at_token,
    client_of,
    held,
    joined,
    request,
)
from tests.support.errors import fails_with
from tests.support.scripted_engine import ScriptedEngine
from tests.support.waiting import meanwhile, until


async def killed(
    client: SGLangEngine,
    scripted: ScriptedEngine,
    at: int,
    asked: ModelRequest | None = None,
    *,
    stream: bool,
) -> Work:
    """A call whose engine died when it had so many tokens."""
    work = await held(client, scripted, at, asked, stream=stream)
    await scripted.die()
    await until(lambda: client.away)
    return work


@pytest.mark.parametrize("at", [0, 4])
async def test_a_death_is_survived_with_what_was_received(
    stream: bool, incremental: bool, at: int
) -> None:
    scripted = ScriptedEngine(incremental=incremental)
    async with scripted.serve(), client_of(scripted) as client:
        work = await killed(client, scripted, at, stream=stream)
        assert not work.done()
        await scripted.revive("3")
        chunks = await work
        assert not client.away
    known = at if stream else 0
    ids, logprobs, versions = joined(chunks)
    assert ids == FORMULA[:10]
    assert len(logprobs) == 10
    assert versions == [0] * known + [3] * (10 - known)
    assert [c.stop_reason for c in chunks if c.stop_reason] == ["length"]
    first, second = scripted.requests
    assert second["input_ids"] == PROMPT + ids[:known]
    assert second["sampling_params"]["max_new_tokens"] == 10 - known
    assert second["rid"] != first["rid"]
    # Nobody asks a dead engine to abort.
    assert scripted.aborted == []
    assert client.version == 3
    assert client.resubmitted == {"death": 1}


async def test_calls_wait_while_the_engine_is_away(
    client: SGLangEngine, scripted: ScriptedEngine, stream: bool
) -> None:
    works = [await killed(client, scripted, 1, request("a"), stream=stream)]
    works += [ask(client, request(r), stream=stream) for r in "bcd"]
    await asyncio.sleep(0)
    assert len(scripted.requests) == 1
    await scripted.revive()
    for chunks in await asyncio.gather(*works):
        assert joined(chunks)[0] == FORMULA[:10]
    assert len(scripted.requests) == 5


async def test_many_calls_survive_many_deaths_exactly(
    client: SGLangEngine, scripted: ScriptedEngine
) -> None:
    """Each death finds every stream one token further."""
    for _ in range(3 * 8):
        scripted.hold(1)
    works = [ask(client, request(str(k)), stream=True) for k in range(8)]
    for version in range(1, 4):
        await at_token(scripted, 1, *works)
        await scripted.die()
        await until(lambda: not scripted.running)
        await scripted.revive(str(version))
    for chunks in await asyncio.gather(*works):
        ids, _, versions = joined(chunks)
        assert ids == FORMULA[:10]
        assert versions == [0, 1, 2] + [3] * 7
    assert scripted.aborted == []


async def test_an_engine_that_never_comes_back_fails_its_calls_as_unavailable(
    scripted: ScriptedEngine, stream: bool
) -> None:
    async with client_of(scripted, update_wait=0.2) as client:
        work = await killed(client, scripted, 2, stream=stream)
        for call in (work, all_of(client, request("new"), stream=stream)):
            with fails_with(EngineUnavailable, "restart") as raised:
                await asyncio.wait_for(call, 60)
            assert raised.value.retry_after
        await scripted.revive()
        await until(lambda: not client.away)
        assert joined(await all_of(client, request(), stream=stream))[0] == FORMULA[:10]


async def test_a_dead_engine_is_noticed_without_a_call(
    client: SGLangEngine, scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("any_agent.engine.sglang.watch.INTERVAL", 0.05)
    async with meanwhile(client.watch(hung_after=60.0)):
        await scripted.die()
        await until(lambda: client.away)
        assert client.silence == 0.0, "it is dead, and does not hang"
        await scripted.revive()
        await until(lambda: not client.away)


async def test_cancelled_calls_stop_waiting(
    client: SGLangEngine, scripted: ScriptedEngine, stream: bool
) -> None:
    work = await killed(client, scripted, 2, request("gone"), stream=stream)
    work.cancel()
    await asyncio.wait([work], timeout=60)
    assert work.cancelled()
    await scripted.revive()
    await all_of(client, request("next"), stream=stream)
    assert [r["rid"] for r in scripted.requests] == ["0-gone;", "0-next;"]
    assert scripted.aborted == []


async def test_a_request_that_kills_its_engine_is_given_up_after_six_tries(
    client: SGLangEngine, scripted: ScriptedEngine, stream: bool
) -> None:
    for _ in range(10):
        scripted.fail("die")
    with pytest.raises(EngineUnavailable) as raised:
        await asyncio.wait_for(all_of(client, request(), stream=stream), 60)
    assert raised.value.retry_after
    # Once, and five resubmissions that brought nothing.
    assert len(scripted.requests) == 6


@pytest.mark.parametrize("kind", ["die", "no_end"])
@pytest.mark.parametrize("after", [4, 10])
async def test_a_stream_that_breaks_off_is_gone_on_with(
    client: SGLangEngine, scripted: ScriptedEngine, kind: Any, after: int
) -> None:
    scripted.fail(kind, after=after)
    chunks = await all_of(client, request(), stream=True)
    assert joined(chunks)[0] == FORMULA[:10]
    assert [c.stop_reason for c in chunks if c.stop_reason] == ["length"]
    assert chunks[-1].stop_reason == "length"
    # No request for zero tokens follows one whose budget was spent.
    expected = [PROMPT, PROMPT + FORMULA[:4]][: 1 + (after < 10)]
    assert [body["input_ids"] for body in scripted.requests] == expected


async def test_a_call_waits_for_a_server_whose_loop_is_dead(
    client: SGLangEngine, scripted: ScriptedEngine, stream: bool
) -> None:
    scripted.ill = True
    scripted.fail("status", status=500)
    work = ask(client, request(), stream=stream)
    await until(lambda: client.away)
    scripted.ill = False
    assert joined(await work)[0] == FORMULA[:10]
    assert len(scripted.requests) == 2


async def test_a_call_waits_for_an_update_after_its_engine_is_back(
    client: SGLangEngine, scripted: ScriptedEngine, stream: bool
) -> None:
    work = await killed(client, scripted, 2, stream=stream)
    for control in (client.pause(), client.resume(1), client.info()):
        with pytest.raises(EngineUnavailable):
            await asyncio.wait_for(control, 60)
    assert client.paused
    await scripted.revive("1")
    await until(lambda: not client.away)
    # It answers, but the update goes on: nobody is let through.
    await client.pause()
    assert len(scripted.requests) == 1
    scripted.weight_version = "2"
    await client.resume(2)
    known = 2 if stream else 0
    assert joined(await work)[2] == [0] * known + [2] * (10 - known)


async def test_a_call_survives_a_death_in_an_update(
    client: SGLangEngine, scripted: ScriptedEngine, stream: bool
) -> None:
    work = await held(client, scripted, 2, stream=stream)
    await client.pause()
    await until(lambda: not scripted.running)
    await scripted.die()
    late = ask(client, request("late"), stream=stream)
    with pytest.raises(EngineUnavailable):
        await asyncio.wait_for(client.resume(1), 60)
    assert client.paused
    await scripted.revive("1")
    await client.resume(1)
    ids, _, versions = joined(await work)
    assert (ids, versions) == (FORMULA[:10], [0] * 2 + [1] * 8)
    assert joined(await late)[2] == [1] * 10


async def test_an_engine_restarted_unnoticed_gives_its_own_version(
    client: SGLangEngine, scripted: ScriptedEngine, stream: bool
) -> None:
    await all_of(client, request(), stream=stream)
    await scripted.die()
    await scripted.revive("7")
    assert joined(await all_of(client, request(), stream=stream))[2] == [7] * 10
    assert client.version == 7


async def test_a_call_goes_on_after_its_connection_broke_in_a_pause(
    scripted: ScriptedEngine,
) -> None:
    """A paused SGLang does not call itself healthy, and is none the less there."""
    async with client_of(scripted, update_mode="in_place") as client:
        work = await held(client, scripted, 2)
        await client.pause()
        scripted.ill = True
        scripted.cut()
        await until(lambda: client.away)
        await until(lambda: not client.away)
        scripted.ill = False
        await client.resume(1)
        assert joined(await work)[0] == FORMULA[:10]
