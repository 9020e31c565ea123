"""Answers that reached nobody: found again by a retry, or never trained on, whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import Request

from any_agent.errors import StoreUnavailable
from proxy_ext import service
from proxy_ext.api import model_call as wire
from proxy_ext.calls import retries
from proxy_ext.journal import PutInteraction
from proxy_ext.sessions import delivery
from proxy_ext.web.exchange import ClientConnection
from tests.support.proxy import HELLO, Proxy, until
from tests.support.proxy_fixtures import Restart, Start
from tests.support.retries import Agent, agent_of, hang_up, stream_of, text_of, tokens_of, unheard
from tests.support.scripted_engine import ScriptedEngine


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_retry_finds_the_answer_of_an_earlier_process(
    restart: Restart, engine: ScriptedEngine, stream: bool
) -> None:
    agent = await unheard(restart, engine, stream=stream, logprobs=True)
    (recorded,) = await agent.recorded()
    if stream:
        events, ended = await stream_of(agent, 1)
        assert ended
        assert {e["id"] for e in events} == {recorded.id}
        assert text_of(events) == recorded.output_message["content"]
        assert tokens_of(events) == len(recorded.output_ids)
    else:
        answer = (await agent.ask(1)).json()
        assert answer["id"] == recorded.id
        assert answer["choices"][0]["message"]["content"] == recorded.output_message["content"]
        assert answer["usage"]["prompt_tokens"] == len(engine.requests[0]["input_ids"])
    assert len(engine.requests) == 1
    assert await agent.end() == [None]


async def test_an_answer_of_an_earlier_process_that_nobody_asks_for_is_not_trained_on(
    restart: Restart, engine: ScriptedEngine
) -> None:
    agent = await unheard(restart, engine)
    assert (await agent.ask(0)).status_code == 200
    assert await agent.end() == ["undelivered", None]


@pytest.mark.parametrize("how", ["continued", "rewarded"])
async def test_a_used_answer_of_an_earlier_process_is_trained_on(
    restart: Restart, engine: ScriptedEngine, how: str
) -> None:
    agent = await unheard(restart, engine)
    (recorded,) = await agent.recorded()
    if how == "continued":
        messages = [*HELLO, recorded.output_message, {"role": "user", "content": "And?"}]
        await agent.proxy.complete(agent.key, messages)
    else:
        reward = {"reward": 1.0, "completion_id": recorded.id}
        assert (await agent.proxy.post("/rl/v1/set_reward", reward, agent.key)).is_success
    assert set(await agent.end()) == {None}


@pytest.mark.parametrize("how", ["at once", "later", "at the end", "with the next write"])
async def test_an_answer_that_was_delivered_stays_delivered(
    restart: Restart, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Its mark is written at once; if the store fails, with the next write, soon, or at the end."""
    if how != "at once":
        monkeypatch.setattr(delivery, "BATCH_SECONDS", 3600.0)
    if how != "later":
        monkeypatch.setattr(service, "SWEEP_SECONDS", 3600.0)
    first = await restart()
    agent = await agent_of(first, engine)
    assert (await agent.ask(0)).status_code == 200

    async def marks() -> list[bool]:
        return [r.delivered for r in await first.service.journal.requests(agent.id)]

    async def written() -> bool:
        return await marks() == [True]

    if how in ("at once", "later"):
        await until(written)
    else:
        assert await marks() == [False]
    expected = [None, None]
    if how == "with the next write":
        other = agent.other(max_completion_tokens=7)
        assert (await other.ask(0)).status_code == 200
        assert await marks() == [True, False]
        expected.append(None)
    agent.proxy = await restart()
    assert (await agent.ask(1)).status_code == 200
    assert len(engine.requests) == len(expected)
    assert await agent.end() == expected


async def test_a_failing_search_of_the_store_hides_no_unheard_answer(
    restart: Restart, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = await unheard(restart, engine)

    async def unreadable(_: str) -> None:
        raise StoreUnavailable("unreadable")

    with monkeypatch.context() as patched:
        patched.setattr(agent.proxy.service.journal, "requests", unreadable)
        assert (await agent.ask(0)).status_code == 503
    assert (await agent.ask(0)).status_code == 200
    assert await agent.end() == ["undelivered", None]


@pytest.mark.parametrize("then", ["finalized", "asked for again"])
async def test_a_failing_mark_in_the_store_hides_no_unheard_answer(
    start: Start, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    proxy = await start("server.retry_grace=0.05", admit=5)
    agent = await agent_of(proxy, engine)
    commit = proxy.service.journal.commit

    async def fails_to_mark(*statements: Any) -> None:
        for one in statements:
            if isinstance(one, PutInteraction) and one.interaction.untrainable_reason:
                raise StoreUnavailable("unwritable")
        await commit(*statements)

    go_on = engine.hold(3)
    await agent.leave(0)
    go_on.set()
    with monkeypatch.context() as patched:
        patched.setattr(proxy.service.journal, "commit", fails_to_mark)
        await until(lambda: not agent.calls, "nobody came back for it")
    if then == "finalized":
        other = agent.other(max_completion_tokens=7)
        assert (await other.ask(0)).status_code == 200
        assert await agent.end() == ["undelivered", None]
    else:
        answer = await agent.ask(1)
        (recorded,) = await agent.recorded()
        assert answer.json()["id"] == recorded.id
        assert await agent.end() == [None]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_retry_whose_client_is_gone_already_is_retried(
    restart: Restart, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    agent = await unheard(restart, engine, stream=stream)
    asked: list[Request] = []

    def noted(request: Request, body: bytes) -> Any:
        asked.append(request)
        return retries.retry_mark(request, body)

    async def late(*args: Any) -> Any:
        await until(asked[0].is_disconnected, "the client is gone")
        return await retries.join_retried_call(*args)

    with monkeypatch.context() as patched:
        patched.setattr(wire, "retry_mark", noted)
        patched.setattr(wire, "join_retried_call", late)
        again = agent.begin(1)
        await until(lambda: asked)
        await hang_up(again)
        await agent.vacant()
    (recorded,) = await agent.recorded()
    assert recorded.id in (await agent.ask(2)).text
    assert len(engine.requests) == 1
    assert await agent.end() == [None]


async def test_an_answer_that_is_cut_off_before_it_is_sent_is_not_delivered(
    proxy: Proxy, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = await agent_of(proxy, engine)
    stop_watching: Callable[..., Any] = ClientConnection.__aexit__

    async def cut_off(self: ClientConnection, *args: object) -> None:
        await stop_watching(self, *args)
        raise asyncio.CancelledError

    with monkeypatch.context() as patched:
        patched.setattr(ClientConnection, "__aexit__", cut_off)
        asked = agent.begin(0)
        await agent.vacant()
        await hang_up(asked)
    assert (await agent.ask(1)).status_code == 200
    assert len(engine.requests) == 1


async def test_no_reward_is_meant_for_an_answer_that_nobody_got(
    start: Start, engine: ScriptedEngine
) -> None:
    """Nor is it where the answer would not have been trained on anyway."""
    proxy = await start("server.retry_grace=3")
    for fields in ({"logit_bias": {"5": 1}}, {"temperature": 0}):
        agent = Agent(proxy, engine, await proxy.open(mode="eval"), **fields)
        heard = (await agent.ask(0)).json()["id"]
        go_on = engine.hold(3)
        await agent.leave(0)
        await agent.vacant()
        go_on.set()
        await until(lambda agent=agent: not agent.calls)
        reasons = {i.id: i.untrainable_reason for i in await agent.recorded()}
        assert reasons.pop(heard) not in (None, "undelivered")
        assert set(reasons.values()) == {"undelivered"}
        reward = await proxy.post("/rl/v1/set_reward", {"reward": 1.0}, agent.key)
        assert reward.json()["interaction_id"] == heard
