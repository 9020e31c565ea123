"""One session by its documented life, and what the network does to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import aiohttp.web
import pytest

from any_agent import errors
from any_agent.protocol.rl import Heartbeat
from any_agent.types import SessionState
from any_agent.workflow import OpenAIProxyClient
from any_agent.workflow import proxy_client as module
from proxy_ext.sessions.session import RecordedSession
from tests.support.areal_client import ArealClient
from tests.support.errors import fails_with
from tests.support.proxy import Proxy, until
from tests.support.scripted_engine import ScriptedEngine
from tests.workflow.conftest import ADMIN, Serve


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def client_of(http: aiohttp.ClientSession, proxy: Proxy, **how: Any) -> OpenAIProxyClient:
    return OpenAIProxyClient(http, f"{proxy.url}/v1/", "task", ADMIN, **how)


async def state(proxy: Proxy, id: str = "task-0-0") -> SessionState:
    row = await proxy.service.journal.session(id)
    assert row is not None
    return row.state


async def test_a_client_has_a_session_only_while_it_is_open(
    http: aiohttp.ClientSession, proxy: Proxy
) -> None:
    client = client_of(http, proxy)
    with fails_with(ValueError, "not open"):
        _ = client.session_api_key
    with fails_with(ValueError, "open it first"):
        await client.export_interactions()
    await client.grant_capacity()
    async with client:
        assert client.session_id == "task-0-0"
        first = await proxy.complete(client.session_api_key)
        second = await proxy.complete(client.session_api_key)
        await client.set_reward(first["id"], 0.5)
        await client.set_last_reward(1.0)
        with pytest.raises(errors.NotFound):
            await client.set_reward("chatcmpl-other", 1.0)
    assert client.interaction_count == 2
    interactions = await client.export_interactions(discount=0.9)
    assert {id: i.reward for id, i in interactions.items()} == {first["id"]: 0.5, second["id"]: 1}
    recorded = await proxy.recorded("task-0-0")
    for interaction, record in zip(interactions.values(), recorded, strict=True):
        tensors = interaction.to_tensor_dict()
        length = tensors["input_ids"].shape
        assert tensors["loss_mask"].sum() == len(record.output_ids)
        assert tensors["logprobs"].shape == tensors["versions"].shape == length
    again = await client.export_interactions(discount=0.9)
    assert again.keys() == interactions.keys()


@pytest.mark.parametrize("mode", ["train", "eval"])
async def test_a_client_rewards_its_session_whatever_the_default_is(
    http: aiohttp.ClientSession, serve: Serve, scripted: ScriptedEngine, mode: Any
) -> None:
    proxy = await serve(scripted.url, "sessions.rewards=judge")
    client = client_of(http, proxy, mode=mode)
    await client.grant_capacity()
    async with client:
        await proxy.complete(client.session_api_key)
        await client.set_last_reward(0.5)
    (interaction,) = (await client.export_interactions()).values()
    assert interaction.reward == 0.5


async def test_a_client_whose_grant_was_taken_starts_its_session_all_the_same(
    http: aiohttp.ClientSession, proxy: Proxy
) -> None:
    client = client_of(http, proxy)
    await client.grant_capacity()
    async with ArealClient(proxy.url, ADMIN) as other:
        await other.start("task")
    async with client:
        assert client.session_id == "task-0-1"
        await proxy.complete(client.session_api_key)
        await client.set_last_reward(0.0)
    assert proxy.service.sessions.grants.left == 0


async def test_an_error_inside_a_session_aborts_the_session(
    http: aiohttp.ClientSession, proxy: Proxy
) -> None:
    client = client_of(http, proxy)
    await client.grant_capacity()
    with pytest.raises(RuntimeError):
        async with client:
            await proxy.complete(client.session_api_key)
            raise RuntimeError("the reward could not be had")
    assert await state(proxy) is SessionState.ABORTED
    with pytest.raises(errors.AnyAgentError):
        await client.export_interactions()


async def test_a_session_sends_heartbeats_while_its_agent_is_busy(
    http: aiohttp.ClientSession, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HEARTBEAT", 0.02)
    beats: list[str] = []
    beat = RecordedSession.heartbeat

    def noted(session: RecordedSession) -> Heartbeat:
        beats.append(session.id)
        return beat(session)

    monkeypatch.setattr(RecordedSession, "heartbeat", noted)
    client = client_of(http, proxy)
    await client.grant_capacity()
    async with client:
        await until(lambda: len(beats) > 1)
        await proxy.complete(client.session_api_key)
        await client.set_last_reward(1.0)
    assert await state(proxy) is SessionState.FINALIZED


class Flaky:
    """A service that loses every first answer to a request, after doing what it asks for."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._seen: set[str] = set()

    async def __call__(self, request: aiohttp.web.BaseRequest) -> aiohttp.web.StreamResponse:
        body = await request.read()
        headers = {k: v for k, v in request.headers.items() if k not in ("Host", "Content-Length")}
        answer = await self._proxy.http.request(
            request.method, str(request.rel_url), content=body, headers=headers
        )
        key = request.headers["Idempotency-Key"]
        if key not in self._seen:
            self._seen.add(key)
            assert request.transport is not None
            request.transport.abort()
        return aiohttp.web.Response(
            body=answer.content, status=answer.status_code, content_type="application/json"
        )


async def test_lost_answers_make_nothing_happen_twice(
    http: aiohttp.ClientSession, proxy: Proxy
) -> None:
    runner = aiohttp.web.ServerRunner(aiohttp.web.Server(Flaky(proxy)))
    await runner.setup()
    site = aiohttp.web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    client = OpenAIProxyClient(http, url, "task", ADMIN)
    await client.grant_capacity()
    assert proxy.service.sessions.grants.left == 1
    async with client:
        assert client.session_id == "task-0-0"
        await proxy.complete(client.session_api_key)
        await client.set_last_reward(1.0)
    assert len(await client.export_interactions()) == 1
    assert [line.session_id async for line in proxy.client.sessions()] == ["task-0-0"]
    await runner.cleanup()


async def test_a_service_that_stays_away_or_refuses_the_key_is_an_error(
    http: aiohttp.ClientSession, proxy: Proxy
) -> None:
    client = OpenAIProxyClient(http, "http://127.0.0.1:9", "task", patience=0.3)
    with pytest.raises(errors.ServiceUnavailable):
        await client.grant_capacity()
    with fails_with(errors.ConfigError, "my-service"):
        await OpenAIProxyClient(http, "my-service", "task").grant_capacity()
    async with asyncio.timeout(60):
        with pytest.raises(errors.Unauthenticated):
            await OpenAIProxyClient(http, proxy.url, "task", "sk-wrong").grant_capacity()
