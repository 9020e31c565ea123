"""Sessions side by side in one process: every call of an unmodified client lands in its own.

The suite `clients` has the same with 200 of each, and with both versions of OpenAI's client.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai import AsyncOpenAI

from any_agent import AgentSession
from tests.support.proxy import HELLO
from tests.support.sdk import crowd
from tests.support.sdk_fixtures import Served

COUNT = 8


@pytest.fixture(autouse=True)
def of_anthropic(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_BASE_URL", served.url)
    monkeypatch.setenv("ANTHROPIC_API_KEY", served.tenant_key)
    monkeypatch.delenv("ANTHROPIC_AUTH_TOKEN", raising=False)


async def recorded(served: Served, asked: crowd.Asked) -> crowd.Asked:
    """What the service has of these sessions."""
    found: crowd.Asked = {}
    for session_id in asked:
        calls = await served.proxy.recorded(session_id)
        found[session_id] = [_text(call.message_delta[-1]["content"]) for call in calls]
    return found


def _text(content: Any) -> str:
    return content if isinstance(content, str) else str(content[0]["text"])


@pytest.mark.parametrize("client", crowd.ON_A_LOOP)
async def test_calls_of_many_tasks_on_one_loop_are_recorded_in_their_own_sessions(
    client: Any, served: Served
) -> None:
    asked = await crowd.on_a_loop(client, COUNT, client.__name__)
    assert len(asked) == COUNT
    assert await recorded(served, asked) == asked


@pytest.mark.parametrize("client", crowd.IN_THREADS)
async def test_calls_of_many_threads_are_recorded_in_their_own_sessions(
    client: Any, served: Served
) -> None:
    asked = await asyncio.to_thread(crowd.in_threads, client, COUNT, client.__name__)
    assert len(asked) == COUNT
    assert await recorded(served, asked) == asked


async def test_calls_of_a_sessions_own_clients_are_recorded_in_it(served: Served) -> None:
    asked = await crowd.own_clients("own")
    assert await recorded(served, asked) == asked


async def test_a_streamed_call_is_recorded_in_its_session(served: Served) -> None:
    async with AsyncOpenAI() as client, AgentSession() as session:
        body: dict[str, Any] = {"model": "m", "messages": HELLO, "max_tokens": 4}
        chunks = [
            chunk async for chunk in await client.chat.completions.create(**body, stream=True)
        ]
        await session.set_reward(1.0, chunks[0].id)
    assert (await served.info(session.session_id))["rewards"] == {chunks[0].id: 1.0}
