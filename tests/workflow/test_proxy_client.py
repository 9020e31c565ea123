"""One session by its documented life, over a bad network, and after the end of its script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import aiohttp.web
import pytest

from any_agent import errors
from any_agent.auth.access import run_dir_of, signer_of
from any_agent.client.rl_client import RLClient
from any_agent.errors import AnyAgentError
from any_agent.protocol.rl import Heartbeat
from any_agent.types import SessionState
from any_agent.workflow import AgentService, OpenAIProxyClient, OpenAIProxyWorkflow, context
from any_agent.workflow import proxy_client as module
from any_agent.workflow.context import WorkflowContext
from proxy_ext.sessions.session import RecordedSession
from tests.support.areal_client import ArealClient
from tests.support.errors import fails_with
from tests.support.proxy import Proxy, until
from tests.support.scripted_engine import ScriptedEngine
from tests.support.workflow.agents import HELLO, MyAgent
from tests.workflow.conftest import ADMIN, Serve


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def client_of(http: aiohttp.ClientSession, proxy: Proxy, **how: Any) -> OpenAIProxyClient:
    return OpenAIProxyClient(http, f"{proxy.url}/v1/", "task", ADMIN, **how)


async def state_of(proxy: Proxy, session_id: str = "task-0-0") -> SessionState:
    row = await proxy.service.journal.session(session_id)
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
    assert await state_of(proxy) is SessionState.ABORTED
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
    assert await state_of(proxy) is SessionState.FINALIZED


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


async def opened(proxy: Proxy, key: str, task: str, *, ended: bool) -> str:
    """A session of an agent whose script does nothing more with it."""
    http = await context.get_aiohttp_session()
    client = OpenAIProxyClient(http, proxy.url, task, key)
    await client.grant_capacity()
    await client.__aenter__()
    await proxy.complete(client.session_api_key)
    if ended:
        await client.set_last_reward(1.0)
        await client.__aexit__(None, None, None)
    assert client.session_id is not None
    return client.session_id


async def test_the_next_start_ends_what_the_last_one_left(proxy: Proxy) -> None:
    key = signer_of(run_dir_of(proxy.service.config)).run_key

    async def begun(key: str) -> int:
        """The status of an opening that takes a grant."""
        asked = {"task_id": "outside", "rewards": "agent"}
        return (await proxy.post("/rl/start_session", asked, key)).status_code

    http = await context.get_aiohttp_session()
    runs = await opened(proxy, key, "runs", ended=False)
    over = await opened(proxy, key, "over", ended=True)
    persons = await opened(proxy, ADMIN, "persons", ended=True)
    for _ in range(3):
        await OpenAIProxyClient(http, proxy.url, "unused", key).grant_capacity()
    await OpenAIProxyClient(http, proxy.url, "unused", ADMIN).grant_capacity()

    # Agents outside get no grant of the trainer's: nobody would train on what they do on it.
    assert await begun(ADMIN) == 200
    assert await begun(ADMIN) == 429

    for epoch in (1, 2, 2):
        async with RLClient(proxy.url, admin_key=key, epoch=epoch) as trainer:
            await trainer.set_capacity(limit=0, ttl=60, owner="new", held=[])
        if epoch == 1:
            assert await state_of(proxy, runs) is SessionState.ABORTED
            assert await state_of(proxy, over) is SessionState.REJECTED
            assert await state_of(proxy, persons) is SessionState.FINALIZED, "it is exported later"
            assert proxy.service.sessions.run_grants.left == 0
            assert await begun(key) == 429
            later = await opened(proxy, key, "later", ended=True)
        if epoch == 2:
            assert await state_of(proxy, later) is SessionState.REJECTED
    assert (await proxy.capacity())["reserved"] == 0


class Odd(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Raises:
    def __init__(self, error: Exception) -> None:
        self.error = error

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        await MyAgent().run(data, **extra_kwargs)
        raise self.error


@pytest.mark.parametrize("error", [ValueError("\ud800 half a character\0"), Odd()])
async def test_whatever_an_agent_raises_its_session_is_aborted(
    proxy: Proxy, error: Exception
) -> None:
    workflow = OpenAIProxyWorkflow.of(Raises(error), AgentService(proxy.url, ADMIN))
    with context.use(WorkflowContext(task_id=7)), pytest.raises(type(error)):
        await workflow.arun_episode(None, {"messages": HELLO})
    assert await state_of(proxy, "7-0-0") is SessionState.ABORTED


async def test_what_cannot_be_exported_is_not_kept(proxy: Proxy) -> None:
    service = AgentService(proxy.url, lambda: ADMIN, export_style="none such")  # type: ignore[arg-type]
    assert ADMIN not in repr(AgentService(proxy.url, ADMIN))
    workflow = OpenAIProxyWorkflow.of(MyAgent(), service)
    with context.use(WorkflowContext(task_id=7)), fails_with(AnyAgentError, param="style"):
        await workflow.arun_episode(None, {"messages": HELLO})
    assert await state_of(proxy, "7-0-0") is SessionState.REJECTED
