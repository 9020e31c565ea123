"""A rank's app in the process that trains: what workflows and scripts use without HTTP."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from any_agent import CompletionWithTokenLogpReward, ModelRequest, ProxyWorkflow
from any_agent.config import Config
from any_agent.errors import ConfigError, InvalidRequest, NotFound, ServiceUnavailable
from any_agent.types import GenerationHyperparameters
from proxy_ext.app import create_app
from tests.support.errors import fails_with
from tests.support.proxy import LIMIT, Proxy, until
from tests.support.proxy_fixtures import Start

FROM_AREAL = Path(__file__).parents[2] / "docs/reference/from-areal.md"


async def attempt(proxy: Proxy, reward: float = 1.0) -> str:
    return str((await proxy.finished_session(reward, wait=LIMIT))["session_id"])


async def test_the_engine_of_a_proxy_in_process_serves_any_event_loop(start: Start) -> None:
    engine = (await start()).front.engine
    request = ModelRequest(input_ids=[1, 2, 3], gconfig=GenerationHyperparameters(max_new_tokens=4))
    here = await engine.agenerate(request)
    assert (here.input_tokens, here.output_len) == ([1, 2, 3], len(here.output_tokens))
    assert here.output_len == len(here.output_logprobs) > 0

    async def elsewhere() -> None:
        there = await engine.agenerate(request)
        assert there.output_tokens == here.output_tokens
        streamed: list[int] = []
        async for chunk in engine.generate(request, stream=True):
            streamed += chunk.output_ids
        assert streamed == here.output_tokens
        assert (await engine.capabilities(), engine.version) == (known, 0)
        with pytest.raises(InvalidRequest):
            await engine.agenerate(ModelRequest(prompt="hello"))
        with pytest.raises(InvalidRequest):
            async for _ in engine.generate(ModelRequest(prompt="hello"), stream=True):
                pass

    known = await engine.capabilities()
    await asyncio.to_thread(asyncio.run, elsewhere())


async def test_sessions_can_be_looked_at_until_they_are_handed_over(proxy: Proxy) -> None:
    app = proxy.front
    assert len(app.session_cache) == 0
    session = await proxy.open()
    id = session["session_id"]
    cache = app.session_cache
    assert list(cache) == [id] and dict(cache[id]) == {}
    answer = await proxy.complete(session["api_key"])
    ((completion_id, one),) = cache[id].items()
    (recorded,) = await proxy.recorded(id)
    assert isinstance(one, CompletionWithTokenLogpReward)
    assert (completion_id, one.id) == (answer["id"], answer["id"])
    assert one.text == answer["choices"][0]["message"]["content"]
    assert one.token_ids == recorded.output_ids.tolist()
    assert one.logprobs == recorded.output_logprobs.tolist()
    assert one.versions == recorded.output_versions.tolist()
    assert one.reward is None and one.messages[-1]["role"] == "user"
    with fails_with(AttributeError, "POST /rl/v1/set_reward"):
        one.reward = 1.0
    reward = {"completion_id": answer["id"], "reward": 0.5}
    await proxy.post("/rl/v1/set_reward", reward, session["api_key"])
    assert cache[id][answer["id"]].reward == 0.5
    await proxy.post("/rl/v1/finalize", {}, session["api_key"])
    assert list(cache) == [id]
    await proxy.lease()
    assert list(cache) == [] and len(cache) == 0
    for unknown in (id, "nobody"):
        with fails_with(KeyError, unknown):
            cache[unknown]


async def test_completions_in_the_journal_alone_are_read_when_asked_for(proxy: Proxy) -> None:
    id = await attempt(proxy)
    sessions = proxy.service.sessions
    sessions.trees.remove(sessions.live[id])
    sessions.live[id].unload()
    with fails_with(ServiceUnavailable, "app.load"):
        list(proxy.front.session_cache[id])
    await proxy.front.load(id)
    assert len(proxy.front.session_cache[id]) == 1
    with pytest.raises(NotFound):
        await proxy.front.load("nobody")


async def test_the_example_in_the_docs_makes_the_proposed_dictionary(start: Start) -> None:
    """The page's code makes one of each session of a group."""
    page = FROM_AREAL.read_text(encoding="utf-8")
    (code,) = re.findall(r"<!-- test: as-proposed -->\n```python\n(.*?)^```$", page, re.M | re.S)
    found: dict[str, Any] = {}
    exec(code, found)
    proxy = await start("sessions.group_size=2")
    waiting = asyncio.create_task(ProxyWorkflow(proxy.front).arun_episode(None, None))
    answers = {}
    for reward in (0.5, 1.0):
        session = await proxy.open(wait=LIMIT, task_id="t")
        answers[reward] = await proxy.complete(session["api_key"])
        await proxy.post("/rl/v1/finalize", {"final_reward": reward}, session["api_key"])
    async with asyncio.timeout(LIMIT):
        episodes = [found["as_proposed"](trajectory) for trajectory in await waiting]
    assert sorted(episode["final_reward"] for episode in episodes) == [0.5, 1.0]
    for episode in episodes:
        (completion,) = episode["completions"]
        answer = answers[episode["final_reward"]]
        assert completion.id == answer["id"]
        assert completion.text == answer["choices"][0]["message"]["content"]
        assert len(completion.token_ids) == len(completion.logprobs) > 0


async def test_many_episodes_at_once_share_nothing_and_lose_nothing(start: Start) -> None:
    """One is on the event loop of another thread."""
    proxy = await start()
    workflows = [ProxyWorkflow(proxy.front) for _ in range(2)]
    episodes = [asyncio.create_task(workflows[k % 2].arun_episode(None, None)) for k in range(5)]
    elsewhere = asyncio.to_thread(lambda: asyncio.run(workflows[0].arun_episode(None, None)))
    episodes.append(asyncio.create_task(elsewhere))
    made = await asyncio.gather(*(attempt(proxy, k) for k in range(6)))
    async with asyncio.timeout(LIMIT):
        taken = await asyncio.gather(*episodes)
    assert Counter(t.session_id for episode in taken for t in episode) == Counter(made)
    assert not proxy.front.session_cache
    assert await proxy.service.journal.counts() == {("train", "trained"): 6}
    # Nobody waits any more, so nobody is admitted.
    assert proxy.front.waiting.total() == 0
    assert (await proxy.http.post("/rl/v1/start_session", json={})).status_code == 429


async def test_a_cancelled_episode_holds_no_slot(start: Start) -> None:
    proxy = await start()
    workflow = ProxyWorkflow(proxy.front)
    waiting = asyncio.create_task(workflow.arun_episode(None, None))
    await until(lambda: proxy.service.sessions.admission.limit > 0, "a slot")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (await proxy.capacity())["limit"] == 0


@pytest.mark.parametrize(("during", "times"), [("lease", 1), ("ack", 1), ("ack", 2)])
async def test_a_group_on_its_way_to_a_cancelled_episode_goes_to_the_next(
    start: Start, monkeypatch: pytest.MonkeyPatch, during: str, times: int
) -> None:
    """Cancelled between the lease and its end, or after that, and once more meanwhile."""
    proxy = await start()
    app = proxy.front
    reached, go_on = asyncio.Event(), asyncio.Event()
    inner = getattr(app, during)

    async def slow(**named: object) -> object:
        result = await inner(**named)
        if result or during == "ack":
            reached.set()
            await go_on.wait()
        return result

    monkeypatch.setattr(app, during, slow)
    workflow = ProxyWorkflow(app)
    left = asyncio.create_task(workflow.arun_episode(None, None))
    id = await attempt(proxy)
    async with asyncio.timeout(LIMIT):
        await reached.wait()
        for _ in range(times):
            left.cancel()
            await asyncio.sleep(0)
        if times == 1:
            go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await left
        go_on.set()
        (trajectory,) = await workflow.arun_episode(None, None)
    assert trajectory.session_id == id
    assert not proxy.service.sessions.lease_index.leased and len(app.session_cache) == 0


async def test_an_episode_with_foreign_data_or_engine_is_refused(start: Start) -> None:
    proxy, other = await start(), object()
    workflow = ProxyWorkflow(proxy.front)
    with fails_with(ConfigError, "arun_episode(engine, None)"):
        await workflow.arun_episode(proxy.front.engine, {"messages": []})
    with fails_with(ConfigError, "the engine that"):
        await workflow.arun_episode(other, None)  # type: ignore[arg-type]
    with fails_with(ConfigError, "dict"):
        ProxyWorkflow({})  # type: ignore[arg-type]


async def test_an_episode_on_an_app_that_does_not_run_is_told_so(start: Start) -> None:
    app = create_app(
        Config(),
        None,  # type: ignore[arg-type]
        rank=0,
        engine_url="http://127.0.0.1:1",
        public_url="http://127.0.0.1:2",
        training=True,
    )
    assert app.engine is app.engine, "a script may hand it on before the start"
    with fails_with(ServiceUnavailable, "not running"):
        await app.engine.agenerate(ModelRequest(input_ids=[1]))
    with fails_with(ServiceUnavailable, "not running"):
        list(app.session_cache)
    with fails_with(ServiceUnavailable, "not running"):
        await ProxyWorkflow(app).arun_episode(None, None)
    proxy = await start()
    await proxy.service.drain()
    with fails_with(ServiceUnavailable, code="draining"):
        await ProxyWorkflow(proxy.front).arun_episode(None, None)
