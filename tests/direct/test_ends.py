"""How calls of the direct client end early, and what is recorded of them."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest

from any_agent import EngineOpenAI
from any_agent.chat import ChatFormat
from tests.direct.conftest import Make
from tests.support.direct import HELLO, MODEL, said
from tests.support.errors import fails_with
from tests.support.scripted_engine import ScriptedEngine
from tests.support.waiting import until

LONG: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 200}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_cancelled_call_ends_in_the_engine(
    client: EngineOpenAI, engine: ScriptedEngine, stream: bool, at: int, n: int
) -> None:
    for _ in range(n):
        engine.hold(at=at)

    async def call() -> None:
        answer: Any = await client.chat.completions.create(**LONG, stream=stream, n=n)
        if stream:
            async for _ in answer:
                pass

    task = asyncio.create_task(call())
    await until(lambda: len(engine.running) == n)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not engine.running)
    assert not client.interactions


async def test_closing_a_stream_ends_its_reader_and_records_nothing(
    client: EngineOpenAI, engine: ScriptedEngine
) -> None:
    engine.hold(at=3)
    stream = await client.chat.completions.create(**LONG, stream=True)

    heard = asyncio.Event()

    async def read() -> None:
        async for _ in stream:
            heard.set()

    reader = asyncio.create_task(read())
    await heard.wait()
    await stream.close()
    async with asyncio.timeout(60):
        with pytest.raises(openai.APIError):
            await reader
    await until(lambda: not engine.running)
    assert not client.interactions


async def test_a_choice_counts_when_its_end_was_taken(
    client: EngineOpenAI, engine: ScriptedEngine, chat: ChatFormat
) -> None:
    engine.say(said(chat, "12"))
    stream = await client.chat.completions.create(**LONG, stream=True)
    ends = []
    async for chunk in stream:
        # All of it is sampled already: nothing is recorded that was not handed over.
        await until(lambda: not engine.running)
        ends.append(chunk.choices[0].finish_reason)
        assert len(client.interactions) == (1 if ends[-1] else 0)
    assert ends[-1] == "stop"


async def test_a_time_out_ends_the_generation(make: Make, engine: ScriptedEngine) -> None:
    client = make(timeout=0.2, max_retries=0)
    engine.hold(at=3)
    with pytest.raises(openai.APITimeoutError):
        await client.chat.completions.create(**LONG)
    await until(lambda: not engine.running)
    engine.hold(at=3)
    stream = await client.chat.completions.create(**LONG, stream=True)
    # As over HTTP: amid a stream it is httpx's own that the SDK lets through.
    with fails_with(httpx.ReadTimeout, "0.2 s"):
        async for _ in stream:
            pass
    await until(lambda: not engine.running)
    assert not client.interactions


async def test_closing_the_client_ends_its_calls(
    client: EngineOpenAI, engine: ScriptedEngine
) -> None:
    await client.chat.completions.create(**LONG | {"max_tokens": 2})
    for _ in range(2):
        engine.hold(at=3)
    stream = await client.chat.completions.create(**LONG, stream=True)
    whole = asyncio.create_task(client.chat.completions.create(**LONG))
    await until(lambda: len(engine.running) == 2)
    await client.close()
    assert client.is_closed()
    with fails_with(openai.APIStatusError, status_code=410, code="session_closed"):
        await whole
    with fails_with(openai.APIError, "closed"):
        async for _ in stream:
            pass
    await until(lambda: not engine.running)
    with fails_with(openai.APIStatusError, "another client"):
        await client.chat.completions.create(**LONG)
    # What it recorded is still there.
    client.set_last_reward(1.0)
    assert len(client.export_interactions()) == 1


async def test_a_call_whose_engine_fails_is_retried_and_recorded_once(
    client: EngineOpenAI, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.fail("status", status=503)
    with fails_with(openai.InternalServerError, status_code=503, code="engine_unavailable"):
        await client.with_options(max_retries=0).chat.completions.create(**LONG)
    engine.fail("error_event", after=3)
    stream = await client.chat.completions.create(**LONG, stream=True)
    with fails_with(openai.APIError, "engine"):
        async for _ in stream:
            pass
    assert not client.interactions
    # The SDK's retries are its own.
    engine.fail("status", status=503)
    retrying = client.with_options(max_retries=1)
    monkeypatch.setattr(retrying, "_calculate_retry_timeout", lambda *_, **__: 0.0)
    await retrying.chat.completions.create(**LONG | {"max_tokens": 2})
    assert len(client.interactions) == 1
