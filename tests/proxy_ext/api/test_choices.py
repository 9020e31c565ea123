"""Calls of several choices: each an interaction; the call is answered whole, or it fails."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import orjson
import pytest

from any_agent.chat import ChatFormat
from proxy_ext.sessions.session_store import SessionStore
from tests.proxy_ext.api.test_chat import say
from tests.proxy_ext.api.test_refusals import refusal
from tests.support.proxy import Proxy, until
from tests.support.proxy_fixtures import Restart, Start
from tests.support.retries import PATH, Agent, agent_of, hang_up, stream_of, unheard
from tests.support.scripted_engine import ScriptedEngine


def texts_of(events: list[dict[str, Any]]) -> dict[int, str]:
    out: dict[int, str] = {}
    for choice in (c for event in events for c in event["choices"]):
        out[choice["index"]] = out.get(choice["index"], "") + (choice["delta"].get("content") or "")
    return out


async def one_recorded(agent: Agent) -> None:
    """Wait until one choice is recorded."""

    async def recorded() -> bool:
        return len(await agent.recorded()) == 1

    await until(recorded)


async def test_each_choice_is_an_interaction(
    proxy: Proxy, engine: ScriptedEngine, chat: ChatFormat
) -> None:
    session = await proxy.open()
    said = [say(engine, chat, text) for text in ("one", "two two", "three")]
    answer = await proxy.complete(session["api_key"], n=3, max_tokens=30)
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
    texts = [c["message"]["content"] for c in answer["choices"]]
    assert sorted(texts) == ["one", "three", "two two"]
    prompt = engine.requests[0]["input_ids"]
    assert all(request["input_ids"] == prompt for request in engine.requests)
    counts = len(prompt), sum(map(len, said))
    usage, stats = answer["usage"], proxy.service.calls.stats
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == counts
    assert (stats.prompt_tokens["train"], stats.output_tokens["train"]) == counts
    assert stats.ended["train", "completed"] == 1
    assert stats.interactions["train", "first"] == 3
    recorded = {i.id: i for i in await proxy.recorded(session["session_id"])}
    assert {id: i.output_message["content"] for id, i in recorded.items()} == {
        f"{answer['id']}.{k}": text for k, text in enumerate(texts)
    }


async def test_streams_are_interleaved_by_index(proxy: Proxy) -> None:
    session = await proxy.open()
    options = {"include_usage": True}
    (*chunks, usage), done = await proxy.stream(
        session["api_key"], n=2, stream_options=options, logprobs=True
    )
    assert done
    (id,) = {chunk["id"] for chunk in chunks}
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["usage"]["completion_tokens"] == 16
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    recorded = {i.id: i for i in await proxy.recorded(session["session_id"])}
    for k, text in texts_of(chunks).items():
        first, *_, last = mine = [choice for choice in choices if choice["index"] == k]
        assert (first["delta"]["role"], last["finish_reason"]) == ("assistant", "length")
        interaction = recorded[f"{id}.{k}"]
        assert interaction.output_message["content"] == text
        told = [e["logprob"] for c in mine if c["logprobs"] for e in c["logprobs"]["content"]]
        assert told == interaction.output_logprobs.tolist()
    assert len(recorded) == 2


async def test_one_choice_is_durable_and_told_while_the_other_is_sampled(
    proxy: Proxy, engine: ScriptedEngine
) -> None:
    agent = await agent_of(proxy, engine, n=2, stream=True)
    engine.hold(1000)
    go_on = engine.hold(2)
    ended = set()
    async with proxy.http.stream(
        "POST", PATH, content=agent.body, headers=agent.headers(None)
    ) as response:
        async for line in response.aiter_lines():
            if '"finish_reason":"length"' not in line:
                continue
            (choice,) = orjson.loads(line[6:])["choices"]
            ended.add(choice["index"])
            if len(ended) == 1:
                (interaction,) = await agent.recorded()
                assert interaction.id.endswith(f".{choice['index']}")
                completion = {"reward": 1.0, "completion_id": interaction.id[:-2]}
                rewarded = await proxy.post("/rl/v1/set_reward", completion, agent.key)
                refusal(rewarded, 400, "choice_needed", "its index")
                assert len(engine.running) == 1
                go_on.set()
    assert ended == {0, 1}


async def test_a_reward_must_name_its_choice_and_goes_to_it(proxy: Proxy) -> None:
    session = await proxy.open()
    id = (await proxy.complete(session["api_key"], n=2))["id"]

    async def reward(value: float, **named: str) -> httpx.Response:
        body = {"reward": value, **named}
        return await proxy.post("/rl/v1/set_reward", body, session["api_key"])

    for named in ({"completion_id": id}, {}):
        refusal(await reward(1.0, **named), 400, "choice_needed", f"{id}.0")
    for name, value in ((f"{id}.0", 1.0), (f"{id}.1", -1.0)):
        given = await reward(value, completion_id=name)
        assert given.json()["interaction_id"] == name
    refusal(await reward(1.0, completion_id=f"{id}.2"), 404, "completion_not_found", "")
    recorded = {i.id: i.reward for i in await proxy.recorded(session["session_id"])}
    assert recorded == {f"{id}.0": 1.0, f"{id}.1": -1.0}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_failing_choice_fails_the_whole_call(
    proxy: Proxy, engine: ScriptedEngine, stream: bool
) -> None:
    session = await proxy.open()
    engine.fail("die", after=1000)
    engine.fail("error_event" if stream else "status", after=3)
    engine.hold(2)
    if stream:
        events, done = await proxy.stream(session["api_key"], n=2)
        assert not done
        assert events[-1]["error"]["code"] == "engine_unavailable"
    else:
        response = await proxy.call(session["api_key"], n=2)
        assert response.status_code == 503
    await until(lambda: not engine.running, "the other one is aborted")
    assert await proxy.recorded(session["session_id"]) == []
    await until(lambda: len(proxy.service.calls) == 0)
    assert proxy.service.calls.concurrency.in_use == 0
    assert proxy.service.calls.stats.ended["train", "failed"] == 1


async def test_what_was_recorded_of_a_failed_call_was_received_only_if_its_end_was_sent(
    proxy: Proxy, engine: ScriptedEngine
) -> None:
    for stream in (False, True):
        agent = await agent_of(proxy, engine, n=2, stream=stream)
        engine.fail("disagree", after=1000)
        engine.fail("disagree", after=2)
        engine.hold(1000)
        go_on = engine.hold(2)
        asked = agent.begin(None)
        await one_recorded(agent)
        go_on.set()
        await asked
        await until(lambda agent=agent: not agent.calls)
        (interaction,) = await agent.recorded()
        assert interaction.untrainable_reason == (None if stream else "undelivered")


async def test_no_two_choices_have_the_same_seed(start: Start, engine: ScriptedEngine) -> None:
    proxy = await start("rollout.deterministic=true", admit=10)
    session, evaluated = await proxy.open(task_id="t", group_id="g"), await proxy.open(mode="eval")
    for _ in range(2):
        await proxy.complete(session["api_key"], n=3)
    await proxy.complete(evaluated["api_key"], n=2, seed=5)
    seeds = [r["sampling_params"]["sampling_seed"] for r in engine.requests]
    assert len(set(seeds[:6])) == 6 and len(set(seeds[6:])) == 2


async def test_each_choice_takes_a_place(start: Start, engine: ScriptedEngine) -> None:
    proxy = await start("server.max_inflight_calls=4", admit=10)
    key = (await proxy.open())["api_key"]
    refusal(await proxy.call(key, n=5), 400, "invalid_request", "at once")
    holds = [engine.hold(1) for _ in range(3)]
    asked = asyncio.create_task(proxy.call(key, n=3))
    await until(lambda: len(engine.running) == 3)
    refusal(await proxy.call(key, n=2), 429, "too_many_calls", "under way")
    assert proxy.service.calls.concurrency.in_use == 3
    for hold in holds:
        hold.set()
    assert (await asked).status_code == 200
    await until(lambda: proxy.service.calls.concurrency.in_use == 0)
    assert engine.most_running == 3


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_retry_joins_in_flight_and_gets_all(
    proxy: Proxy, engine: ScriptedEngine, stream: bool
) -> None:
    agent = await agent_of(proxy, engine, n=2, stream=stream)
    engine.hold(1000)
    go_on = engine.hold(3)
    await agent.leave(0)
    await agent.vacant()
    await one_recorded(agent)
    again = asyncio.create_task(_answer(agent, stream, 1))
    await until(lambda: not agent.calls[0].vacant)
    go_on.set()
    assert await again == await _recorded_texts(agent)
    assert len(engine.requests) == 2
    assert await agent.end() == [None, None]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_retry_finds_all_of_an_earlier_process(
    restart: Restart, engine: ScriptedEngine, stream: bool
) -> None:
    agent = await unheard(restart, engine, n=2, stream=stream)
    assert await _answer(agent, stream, 1) == await _recorded_texts(agent)
    assert len(engine.requests) == 2
    assert await agent.end() == [None, None]


async def test_a_retry_finds_nothing_of_an_earlier_process_that_had_not_all(
    restart: Restart, engine: ScriptedEngine
) -> None:
    agent = await agent_of(await restart(), engine, n=2)
    engine.hold(1000)
    engine.hold(3)
    await agent.leave(0)
    await one_recorded(agent)
    agent.proxy = await restart()
    assert (await agent.ask(1)).status_code == 200
    assert len(engine.requests) == 4
    assert await agent.end() == ["undelivered", None, None]


async def test_a_call_that_has_failed_is_taken_up_by_nobody(
    proxy: Proxy, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client leaves while its other choice is being recorded."""
    agent = await agent_of(proxy, engine, n=2)
    recording, go_on = asyncio.Event(), asyncio.Event()
    record = SessionStore.record

    async def slowly(*args: Any) -> Any:
        recording.set()
        await go_on.wait()
        return await record(*args)

    monkeypatch.setattr(SessionStore, "record", slowly)
    engine.fail("status", status=500)
    asked = agent.begin(0)
    await recording.wait()
    (call,) = agent.calls
    await until(lambda: call.failed)
    await hang_up(asked)
    again = agent.begin(1)
    await until(lambda: call.watchers, "the retry waits for its end")
    go_on.set()
    assert (await again).status_code == 200
    assert len(engine.requests) == 4
    assert proxy.service.calls.stats.retries == {"new": 1}
    reasons = [i.untrainable_reason for i in await agent.recorded()]
    assert sorted(reasons, key=str) == [None, None, "undelivered"]


async def _answer(agent: Agent, stream: bool, count: int) -> dict[int, str]:
    if stream:
        events, ended = await stream_of(agent, count)
        assert ended
        return texts_of(events)
    body = (await agent.ask(count)).json()
    return {c["index"]: c["message"]["content"] for c in body["choices"]}


async def _recorded_texts(agent: Agent) -> dict[int, str]:
    found = await agent.recorded()
    return {int(i.id.rpartition(".")[2]): i.output_message["content"] for i in found}
