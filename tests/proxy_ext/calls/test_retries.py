"""Model calls whose SDK marks its retries: sampled once; not trained on if nobody heard them."""

from __future__ import annotations

import asyncio

import httpx
import orjson
import pytest

from proxy_ext.calls import retries
from tests.support.proxy import HELLO, LIMIT, Proxy, until
from tests.support.proxy_fixtures import Start
from tests.support.retries import (
    Agent,
    agent_of,
    hang_up,
    left,
    left_with_an_answer,
    stream_of,
    text_of,
    tokens_of,
)
from tests.support.scripted_engine import ScriptedEngine


async def test_a_retry_joins_the_call_in_flight(proxy: Proxy, engine: ScriptedEngine) -> None:
    agent, go_on = await left(proxy, engine)
    again = agent.begin(1)
    await until(lambda: not agent.calls[0].vacant, "it is taken up")
    go_on.set()
    answer = await again
    assert answer.status_code == 200
    assert len(engine.requests) == 1
    (recorded,) = await agent.recorded()
    assert answer.json()["id"] == recorded.id == answer.headers["x-any-agent-interaction"]
    assert answer.headers["x-any-agent-session"] == agent.id
    assert await agent.end() == [None]


async def test_a_recorded_answer_is_replayed_as_it_was(
    proxy: Proxy, engine: ScriptedEngine
) -> None:
    agent = await left_with_an_answer(proxy, engine, logprobs=True, temperature=0.5)
    answer = await agent.ask(2)
    assert len(engine.requests) == 1
    (recorded,) = await agent.recorded()
    body = answer.json()
    assert body["id"] == recorded.id
    assert body["choices"][0]["message"]["content"] == recorded.output_message["content"]
    assert len(body["choices"][0]["logprobs"]["content"]) == len(recorded.output_ids)
    assert body["usage"]["completion_tokens"] == len(recorded.output_ids)
    assert orjson.loads(answer.headers["x-any-agent-overrides"]) == {"temperature": 1.0}
    # It was answered: the same once more is another sample.
    assert (await agent.ask(3)).json()["id"] != body["id"]
    assert await agent.end() == [None, None]


async def asked(
    proxy: Proxy, engine: ScriptedEngine
) -> tuple[Agent, asyncio.Event, asyncio.Task[httpx.Response]]:
    """An agent, what the engine goes on with, and its call, whose client stays."""
    agent = await agent_of(proxy, engine)
    go_on, first = engine.hold(3), agent.begin(0)
    await until(lambda: len(engine.requests) == 1)
    return agent, go_on, first


async def test_a_retry_waits_for_the_news_that_the_client_left(
    proxy: Proxy, engine: ScriptedEngine
) -> None:
    agent, go_on, first = await asked(proxy, engine)
    again = agent.begin(1)
    await until(lambda: agent.calls[0].watchers, "it waits")
    await hang_up(first)
    await until(lambda: agent.calls[0].mark is not None and agent.calls[0].mark.retry_count == 1)
    go_on.set()
    assert (await again).status_code == 200
    assert len(engine.requests) == 1


async def test_a_retry_of_a_call_whose_client_stays_is_a_call(
    proxy: Proxy, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "NEWS_SECONDS", 0.05)
    agent, go_on, first = await asked(proxy, engine)
    other = await agent.ask(1)
    go_on.set()
    assert other.json()["id"] != (await first).json()["id"]
    assert len(engine.requests) == 2


async def test_a_retry_that_waits_is_let_go_by_the_answer(
    proxy: Proxy, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "NEWS_SECONDS", LIMIT)
    agent, go_on, first = await asked(proxy, engine)
    again = agent.begin(1)
    await until(lambda: agent.calls[0].watchers, "it waits")
    go_on.set()
    assert (await first).json()["id"] != (await again).json()["id"]


async def test_identical_bodies_without_a_retry_mark_are_sampled_each(
    proxy: Proxy, engine: ScriptedEngine
) -> None:
    agent = await agent_of(proxy, engine)
    answers = [await agent.ask(None) for _ in range(2)] + [await agent.ask(0) for _ in range(2)]
    assert len({a.json()["id"] for a in answers}) == len(engine.requests) == 4
    assert await agent.end() == [None] * 4


async def test_a_call_is_taken_up_by_higher_counts_and_equal_bodies_alone(
    proxy: Proxy, engine: ScriptedEngine
) -> None:
    agent = await agent_of(proxy, engine)
    go_on = engine.hold(3)
    await agent.leave(1)
    await agent.vacant()
    other = agent.other(max_completion_tokens=7)
    assert (await other.ask(2)).status_code == 200
    assert (await agent.ask(1)).status_code == 200
    assert len(engine.requests) == 3
    again = agent.begin(2)
    await until(lambda: not agent.calls[0].vacant)
    go_on.set()
    assert (await again).status_code == 200
    assert len(engine.requests) == 3


async def test_the_oldest_abandoned_call_is_taken_up_first_and_each_once(
    proxy: Proxy, engine: ScriptedEngine
) -> None:
    agent = await agent_of(proxy, engine)
    holds = [engine.hold(3) for _ in range(2)]
    for number in (1, 2):
        await agent.leave(0)
        await agent.vacant(number)
    first, second = agent.calls
    for hold in holds:
        hold.set()
    await agent.answered()
    answers = [await agent.ask(1) for _ in range(2)]
    assert [a.json()["id"] for a in answers] == [first.head.id, second.head.id]
    assert len(engine.requests) == 2


async def test_a_retry_that_leaves_too_is_retried(proxy: Proxy, engine: ScriptedEngine) -> None:
    agent, go_on = await left(proxy, engine)
    again = agent.begin(1)
    await until(lambda: not agent.calls[0].vacant)
    await hang_up(again)
    await agent.vacant()
    go_on.set()
    assert (await agent.ask(2)).status_code == 200
    assert len(engine.requests) == 1
    assert await agent.end() == [None]


@pytest.mark.parametrize("when", ["in flight", "recorded"])
async def test_a_stream_is_taken_up_from_its_beginning(
    proxy: Proxy, engine: ScriptedEngine, when: str
) -> None:
    usage = {"include_usage": True}
    agent = await agent_of(proxy, engine, stream=True, logprobs=True, stream_options=usage)
    go_on = engine.hold(5)
    begun, _ = await stream_of(agent, 0, most=3)
    await agent.vacant()
    if when == "recorded":
        go_on.set()
        await agent.answered()
    again = asyncio.create_task(stream_of(agent, 1))
    if when == "in flight":
        await until(lambda: not agent.calls[0].vacant)
        go_on.set()
    whole, ended = await again
    assert ended
    (recorded,) = await agent.recorded()
    assert {e["id"] for e in begun + whole} == {recorded.id}
    assert text_of(whole) == recorded.output_message["content"]
    assert text_of(whole).startswith(text_of(begun))
    assert tokens_of(whole) == len(recorded.output_ids) == whole[-1]["usage"]["completion_tokens"]
    assert len(engine.requests) == 1
    assert await agent.end() == [None]


@pytest.mark.parametrize(("grace", "count"), [("60", None), ("0.05", 0)], ids=["unmarked", "late"])
async def test_a_call_that_nobody_can_come_back_for_ends(
    start: Start, engine: ScriptedEngine, grace: str, count: int | None
) -> None:
    proxy = await start(f"server.retry_grace={grace}", admit=5)
    agent = await agent_of(proxy, engine)
    engine.hold(3)
    await agent.leave(count)
    await until(lambda: engine.cancelled or engine.aborted, "the generation ends")
    await until(lambda: not agent.calls)
    # Nothing is left to be taken up.
    assert (await agent.ask(1)).status_code == 200
    assert len(engine.requests) == 2


async def test_an_answer_that_nobody_comes_back_for_is_not_trained_on(
    start: Start, engine: ScriptedEngine
) -> None:
    proxy = await start("server.retry_grace=3", admit=5)
    agent, go_on = await left(proxy, engine)
    go_on.set()
    await until(lambda: not agent.calls)
    assert (await agent.ask(1)).status_code == 200
    assert await agent.end() == ["undelivered", None]


async def test_an_answer_whose_session_ends_before_a_retry_is_not_trained_on(
    proxy: Proxy, engine: ScriptedEngine
) -> None:
    agent = await agent_of(proxy, engine)
    await agent.ask(0)
    other = agent.other(max_completion_tokens=7)
    go_on = engine.hold(3)
    await other.leave(0)
    await other.vacant()
    go_on.set()
    await other.answered()
    # A reward without an id means what the agent has, and the later answer it has not.
    rewarded = await proxy.post("/rl/v1/set_reward", {"reward": 1.0}, agent.key)
    first, _ = await agent.recorded()
    assert rewarded.json()["interaction_id"] == first.id
    assert await agent.end() == [None, "undelivered"]
    assert (await agent.recorded())[1].untrainable_reason == "undelivered"


async def test_an_answer_that_was_continued_was_received(
    start: Start, engine: ScriptedEngine
) -> None:
    proxy = await start("server.retry_grace=3", admit=5)
    agent = await left_with_an_answer(proxy, engine)
    (recorded,) = await agent.recorded()
    messages = [*HELLO, recorded.output_message, {"role": "user", "content": "And?"}]
    await proxy.complete(agent.key, messages)
    await until(lambda: not agent.calls)
    assert await agent.end() == [None, None]
