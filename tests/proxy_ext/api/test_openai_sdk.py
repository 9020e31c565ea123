"""The real OpenAI SDK against the proxy: errors and retries."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from tests.support.errors import fails_with
from tests.support.proxy import HELLO, Proxy
from tests.support.scripted_engine import ScriptedEngine

MODEL = "gpt-4o"


@pytest.fixture
def sent() -> list[str]:
    """Paths of the requests that the SDK made."""
    return []


@pytest.fixture
async def sdk(proxy: Proxy, sent: list[str]) -> AsyncIterator[openai.AsyncOpenAI]:
    session = await proxy.open()

    async def note(request: httpx.Request) -> None:
        sent.append(request.url.path)

    http = httpx.AsyncClient(event_hooks={"request": [note]})
    async with openai.AsyncOpenAI(
        base_url=session["base_url"], api_key=session["api_key"], http_client=http
    ) as client:
        yield client


async def test_errors_come_as_their_classes_and_are_not_retried(
    sdk: openai.AsyncOpenAI, proxy: Proxy, sent: list[str]
) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": HELLO}
    long = [{"role": "user", "content": "many words " * 2000}]
    with fails_with(openai.BadRequestError, code="context_length_exceeded"):
        await sdk.chat.completions.create(**asked | {"messages": long})
    with fails_with(openai.BadRequestError, code="unsupported_parameter", param="modalities"):
        await sdk.chat.completions.create(**asked, modalities=["audio"])
    with pytest.raises(openai.AuthenticationError):
        await sdk.with_options(api_key="sk-v1.0.x").chat.completions.create(**asked)
    with pytest.raises(openai.NotFoundError):
        await sdk.embeddings.create(model=MODEL, input="x", encoding_format="float")
    another = {"x-api-key": "sk-v1.0.another"}
    with fails_with(openai.BadRequestError, code="session_mismatch"):
        await sdk.chat.completions.create(**asked, extra_headers=another)
    assert len(sent) == 5
    await sdk.chat.completions.create(**asked, max_tokens=2)
    await proxy.post("/rl/v1/finalize", {"final_reward": 1}, sdk.api_key)
    sent.clear()
    with fails_with(openai.APIStatusError, "new session", status_code=410):
        await sdk.chat.completions.create(**asked)
    with pytest.raises(openai.ConflictError):
        # As a custom client would post to us through the SDK.
        await sdk.post(
            "/../rl/v1/export_trajectories",
            cast_to=object,
            body={"session_ids": [(await proxy.open())["session_id"]]},
            options={"headers": {"Authorization": "Bearer operator"}},
        )
    assert len(sent) == 2


async def test_an_engine_that_is_away_is_tried_again(
    sdk: openai.AsyncOpenAI, engine: ScriptedEngine, sent: list[str], proxy: Proxy
) -> None:
    engine.fail("status", status=503)
    client = sdk.with_options(max_retries=1)
    # Retry-After is 2 s: the test does not wait for it.
    client._calculate_retry_timeout = lambda *_, **__: 0.0  # type: ignore[method-assign]
    await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=3)
    assert len(sent) == 2
    session = next(iter(proxy.service.sessions.live.values()))
    assert len(await proxy.recorded(session.id)) == 1
