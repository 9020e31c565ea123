"""Calls under a grammar cannot be resumed; and what an engine can do is asked once."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from any_agent.engine import Capabilities, SGLangEngine
from any_agent.errors import EngineMismatch, EngineUnavailable
from any_agent.types import id_array
from tests.support.engine.sglang import (
    FORMULA,
    PROMPT,
    all_of,
    ask,
    client_of,
    held,
    joined,
    request,
    update,
)
from tests.support.errors import fails_with
from tests.support.scripted_engine import ScriptedEngine
from tests.support.waiting import until

GRAMMAR = '{"regex": ".*"}'


async def test_an_update_waits_for_calls_under_a_grammar(
    client: SGLangEngine, scripted: ScriptedEngine, stream: bool
) -> None:
    bound, free = scripted.hold(3), scripted.hold(2)
    asked = (request("bound", grammar=GRAMMAR), request("free"))
    works = [ask(client, one, stream=stream) for one in asked]
    runs = scripted.running
    await until(lambda: sorted(len(run.ids) for run in runs.values()) == [2, 3])
    pause = asyncio.create_task(client.pause())
    late = ask(client, request("late"), stream=stream)
    free.set()
    # The others sample on, and may end, while it waits; new ones do not begin.
    ids, _, versions = joined(await works[1])
    assert (ids, versions) == (FORMULA[:10], [0] * 10)
    assert not pause.done() and not scripted.pauses
    bound.set()
    ids, _, versions = joined(await works[0])
    assert (ids, versions) == (FORMULA[:10], [0] * 10)
    await pause
    assert scripted.pauses == ["abort"]
    assert len(scripted.requests) == 2
    scripted.weight_version = "1"
    await client.resume(1)
    assert joined(await late)[2] == [1] * 10
    assert client.resubmitted == {}


async def test_a_call_under_a_grammar_that_outlasts_the_wait_fails_by_name(
    scripted: ScriptedEngine, stream: bool
) -> None:
    """One without a token begins again."""
    async with client_of(scripted, update_wait=0.1) as client:
        work = await held(client, scripted, 3, request(grammar=GRAMMAR), stream=stream)
        await client.pause()
        with fails_with(EngineUnavailable, "grammar", "update") as raised:
            await work
        assert raised.value.retry_after
        assert len(scripted.requests) == 1
        await client.resume(1)
        work = await held(client, scripted, 0, request(grammar=GRAMMAR), stream=stream)
        await client.pause()
        await client.resume(2)
        assert joined(await work)[0] == FORMULA[:10]
        scripted.fail("die", after=2)
        if stream:
            with fails_with(EngineUnavailable, "death", "grammar"):
                await all_of(client, request(grammar=GRAMMAR), stream=True)


async def test_packed_ids_and_likeliest_tokens_survive_an_update(
    client: SGLangEngine, scripted: ScriptedEngine, stream: bool
) -> None:
    asked = replace(request(), input_ids=id_array(PROMPT), top_logprobs=2)
    work = await held(client, scripted, 4, asked, stream=stream)
    await update(client, scripted, 1)
    chunks = await work
    assert joined(chunks)[0] == FORMULA[:10]
    assert [body["input_ids"] for body in scripted.requests] == [PROMPT, PROMPT + FORMULA[:4]]
    tops = [top for chunk in chunks for top in chunk.top_logprobs or []]
    assert [top[0][0] for top in tops] == FORMULA[:10]
    assert isinstance(asked.input_ids, np.ndarray) and len(asked.input_ids) == len(PROMPT)


async def test_an_engine_that_truncates_prompts_is_refused(
    client: SGLangEngine, scripted: ScriptedEngine, stream: bool
) -> None:
    scripted.planted = {"truncates"}
    with fails_with(EngineMismatch, "prompt tokens"):
        await all_of(client, request(), stream=stream)
    assert not client.away
    await until(lambda: not scripted.running)


async def test_a_cumulative_stream_is_warned_of_once(
    client: SGLangEngine,
    scripted: ScriptedEngine,
    caplog: pytest.LogCaptureFixture,
    incremental: bool,
) -> None:
    scripted.told = {"incremental_streaming_output": incremental}
    for _ in range(2):
        await client.capabilities()
    assert len(caplog.records) == (0 if incremental else 1)


async def test_capabilities_are_asked_once_and_after_a_death(
    client: SGLangEngine, scripted: ScriptedEngine
) -> None:
    await scripted.die()
    with pytest.raises(EngineUnavailable):
        await client.capabilities()
    await scripted.revive()
    assert await client.capabilities() == Capabilities()
    scripted.told = {"grammar_backend": "none"}
    assert (await client.capabilities()).grammar
    scripted.fail("die", after=0)
    await all_of(client, request(), stream=True)
    assert not (await client.capabilities()).grammar
