"""Streams whose tokens take long: the head leaves at once, and pings keep the connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from any_agent.chat import ChatFormat
from any_agent.completions.apis import all_apis
from any_agent.launcher.trial import trial_dir
from any_agent.rundir.registry import Heartbeat
from proxy_ext.server import entry_of
from tests.proxy_ext.api.test_chat import say
from tests.support.errors import fails_with
from tests.support.proxy import LIMIT, Proxy, config_for, running_proxy
from tests.support.router import serving
from tests.support.scripted_engine import ScriptedEngine

ASK: Any = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": ASK},
    "completions": {"prompt": "hi"},
    "responses": {"input": ASK},
    "messages": {"messages": ASK, "max_tokens": 50},
}
PATIENCE = 4.0
"""Seconds that a client waits for a byte."""
SILENCE = 6.0
"""Seconds without a token, before the first one and again later."""


@dataclass
class Service:
    """A rank behind a router."""

    url: str
    proxy: Proxy
    engine: ScriptedEngine
    chat: ChatFormat

    async def key(self) -> str:
        return str((await self.proxy.open())["api_key"])


@pytest.fixture
async def service(
    tmp_path: Path, chat: ChatFormat, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Service]:
    monkeypatch.setattr("proxy_ext.web.exchange.HOLD_SECONDS", 0.1)
    monkeypatch.setattr("proxy_ext.web.exchange.PING_SECONDS", 0.3)
    config = config_for(tmp_path, "sessions.group_size=1", "server.ranks=1")
    engine = ScriptedEngine(decode=chat.decode, incremental=True)
    async with (
        engine.serve() as engine_url,
        running_proxy(config, chat, engine_url=engine_url) as proxy,
    ):
        await proxy.admit(100)
        entry = partial(entry_of, proxy.service, url=proxy.url, boot_id="boot")
        heartbeat = Heartbeat(trial_dir(config).registry, entry)
        await heartbeat.begin()
        async with serving(config) as (_, port):
            yield Service(f"http://127.0.0.1:{port}", proxy, engine, chat)
        await heartbeat.end()


def openai_client(service: Service, key: str, read: float) -> openai.AsyncOpenAI:
    timeout = openai.Timeout(LIMIT, read=read)
    url = f"{service.url}/v1"
    return openai.AsyncOpenAI(base_url=url, api_key=key, timeout=timeout, max_retries=0)


async def chat_of(service: Service, key: str, read: float) -> str:
    async with openai_client(service, key, read) as client:
        stream = await client.chat.completions.create(model="m", messages=ASK, stream=True)
        return "".join([c.choices[0].delta.content or "" async for c in stream])


async def response_of(service: Service, key: str, read: float) -> str:
    async with (
        openai_client(service, key, read) as client,
        client.responses.stream(model="m", input=ASK) as stream,
    ):
        events = [event async for event in stream]
        if (failed := next((e for e in events if e.type == "response.failed"), None)) is not None:
            assert failed.response.error is not None
            raise RuntimeError(failed.response.error.message)
        return (await stream.get_final_response()).output_text


async def message_of(service: Service, key: str, read: float) -> str:
    async with (
        anthropic.AsyncAnthropic(
            base_url=service.url,
            api_key=key,
            timeout=anthropic.Timeout(LIMIT, read=read),
            max_retries=0,
        ) as client,
        client.messages.stream(model="m", messages=ASK, max_tokens=50) as stream,
    ):
        return await stream.get_final_text()


SDKS = (chat_of, response_of, message_of)


@pytest.mark.service
async def test_every_sdk_waits_for_slow_tokens(service: Service) -> None:
    """Also where its time-outs, for the head and for the next byte, are shorter."""
    loop = asyncio.get_running_loop()
    answers: list[Awaitable[str]] = []
    for sdk in SDKS:
        say(service.engine, service.chat, "well, slow")
        gate = service.engine.step()
        answers.append(asyncio.create_task(sdk(service, await service.key(), PATIENCE)))
        loop.call_later(SILENCE, gate.release)
        loop.call_later(2 * SILENCE, lambda gate=gate: [gate.release() for _ in range(50)])
    assert await asyncio.gather(*answers) == ["well, slow"] * len(SDKS)
    assert service.proxy.service.calls.stats.retries == {}


async def test_every_sdk_raises_what_fails_after_the_head(service: Service) -> None:
    errors = (openai.APIError, RuntimeError, anthropic.APIStatusError)
    for sdk, error in zip(SDKS, errors, strict=True):
        service.engine.fail("error_event", after=1)
        go_on = service.engine.hold(0)
        asyncio.get_running_loop().call_later(0.5, go_on.set)
        with fails_with(error, "engine"):
            await sdk(service, await service.key(), LIMIT)


@pytest.mark.parametrize("path", BODIES)
async def test_the_head_and_pings_come_before_the_first_token(service: Service, path: str) -> None:
    session = await service.proxy.open()
    go_on = service.engine.hold(0)
    say(service.engine, service.chat, "at last")
    body = {"model": "m", "stream": True, **BODIES[path]}
    headers = {"authorization": f"Bearer {session['api_key']}"}
    (api,) = [api for api in all_apis() if api.path == f"/{path}"]
    data = b""
    async with (
        httpx.AsyncClient(timeout=LIMIT) as http,
        http.stream("POST", f"{service.url}/v1/{path}", json=body, headers=headers) as response,
    ):
        assert response.status_code == 200
        assert response.headers["x-any-agent-session"] == session["session_id"]
        assert response.headers["content-type"].startswith("text/event-stream")
        async for part in response.aiter_raw():
            data += part
            if not go_on.is_set() and len(data) >= 2 * len(api.ping):
                # Nothing else was sent, and no token exists.
                assert data == 2 * api.ping
                go_on.set()
    (interaction,) = await service.proxy.recorded(session["session_id"])
    assert service.chat.decode(interaction.output_ids.tolist()).startswith("at last")
    assert interaction.trainable
