"""Model calls whose SDK marks its retries: sampled once; not trained on if nobody heard them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import orjson
import pytest

from any_agent.chat import ChatFormat
from any_agent.types import Interaction
from proxy_ext import service
from proxy_ext.calls import retries
from proxy_ext.calls.call import Call
from proxy_ext.calls.delivery import Deliveries
from tests.fakes.scripted_engine import ScriptedEngine
from tests.proxy_ext.conftest import Start
from tests.proxy_ext.proxy_lab import HELLO, LIMIT, Proxy, config_for, running_proxy, until

PATH = "/v1/chat/completions"


class Agent:
    """Sends one body again and again, marked or not."""

    def __init__(
        self, proxy: Proxy, engine: ScriptedEngine, session: dict[str, Any], **fields: Any
    ) -> None:
        self.proxy = proxy
        self.engine = engine
        self.key = session["api_key"]
        self.id = session["session_id"]
        self.body = orjson.dumps({"model": "m", "messages": HELLO, "max_tokens": 8, **fields})

    def other(self, **fields: Any) -> Agent:
        """The same session's, with another body."""
        session = {"api_key": self.key, "session_id": self.id}
        return Agent(self.proxy, self.engine, session, **fields)

    def headers(self, count: int | None) -> dict[str, str]:
        marked = {} if count is None else {"x-stainless-retry-count": str(count)}
        return {"authorization": f"Bearer {self.key}", **marked}

    async def ask(self, count: int | None) -> httpx.Response:
        return await self.proxy.http.post(PATH, content=self.body, headers=self.headers(count))

    def begin(self, count: int | None) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(self.ask(count))

    async def leave(self, count: int | None) -> None:
        """Ask, and leave once the engine samples for it."""
        before = len(self.engine.requests)
        asked = self.begin(count)
        await until(lambda: len(self.engine.requests) > before)
        await hang_up(asked)

    @property
    def calls(self) -> list[Call]:
        session = self.proxy.service.sessions.live[self.id]
        return sorted(session.calls, key=lambda call: call.number)

    async def recorded(self) -> list[Interaction]:
        return await self.proxy.recorded(self.id)

    async def vacant(self, number: int = 1) -> None:
        """Until so many calls have lost their client."""
        await until(lambda: sum(call.vacant for call in self.calls) == number, "its client is gone")

    async def answered(self) -> None:
        await until(lambda: all(call.interaction is not None for call in self.calls))

    async def end(self, reward: float = 1.0) -> list[str | None]:
        """Finalize; why each interaction is not trained on."""
        done = await self.proxy.post("/rl/v1/finalize", {"final_reward": reward}, self.key)
        assert done.status_code == 200, done.text
        (trajectory,) = await self.proxy.lease()
        return [i.untrainable_reason for i in trajectory.interactions]


async def hang_up(asked: asyncio.Task[httpx.Response]) -> None:
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)


async def agent_of(proxy: Proxy, engine: ScriptedEngine, **fields: Any) -> Agent:
    return Agent(proxy, engine, await proxy.open(), **fields)


async def test_a_retry_joins_the_call_in_flight(proxy: Proxy, engine: ScriptedEngine) -> None:
    agent = await agent_of(proxy, engine)
    go_on = engine.hold(3)
    await agent.leave(0)
    await agent.vacant()
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
    agent = await agent_of(proxy, engine, logprobs=True, temperature=0.5)
    go_on = engine.hold(3)
    await agent.leave(0)
    await agent.vacant()
    go_on.set()
    await agent.answered()
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


async def test_a_retry_waits_for_the_news_that_the_client_left(
    proxy: Proxy, engine: ScriptedEngine
) -> None:
    agent = await agent_of(proxy, engine)
    go_on = engine.hold(3)
    first = agent.begin(0)
    await until(lambda: len(engine.requests) == 1)
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
    agent = await agent_of(proxy, engine)
    go_on = engine.hold(3)
    first = agent.begin(0)
    await until(lambda: len(engine.requests) == 1)
    other = await agent.ask(1)
    go_on.set()
    assert other.json()["id"] != (await first).json()["id"]
    assert len(engine.requests) == 2


async def test_a_retry_that_waits_is_let_go_by_the_answer(
    proxy: Proxy, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "NEWS_SECONDS", LIMIT)
    agent = await agent_of(proxy, engine)
    go_on = engine.hold(3)
    first = agent.begin(0)
    await until(lambda: len(engine.requests) == 1)
    again = agent.begin(1)
    await until(lambda: agent.calls[0].watchers, "it waits")
    go_on.set()
    assert (await first).json()["id"] != (await again).json()["id"]


async def test_identical_bodies_without_a_mark_are_so_many_samples(
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


async def test_the_oldest_is_taken_up_first_and_each_once(
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
    agent = await agent_of(proxy, engine)
    go_on = engine.hold(3)
    await agent.leave(0)
    await agent.vacant()
    again = agent.begin(1)
    await until(lambda: not agent.calls[0].vacant)
    await hang_up(again)
    await agent.vacant()
    go_on.set()
    assert (await agent.ask(2)).status_code == 200
    assert len(engine.requests) == 1
    assert await agent.end() == [None]


async def stream_of(
    agent: Agent, count: int | None, *, most: int = 1000
) -> tuple[list[dict[str, Any]], bool]:
    """Up to so many of a stream's events, and whether it ended; then it is left."""
    events: list[dict[str, Any]] = []
    request = agent.proxy.http.stream(
        "POST", PATH, content=agent.body, headers=agent.headers(count)
    )
    async with request as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return events, True
            if line:
                events.append(orjson.loads(line.removeprefix("data: ")))
            if len(events) >= most:
                break
    return events, False


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(c["delta"].get("content") or "" for e in events for c in e["choices"])


def tokens_of(events: list[dict[str, Any]]) -> int:
    return sum(
        len(c["logprobs"]["content"]) for e in events for c in e["choices"] if c.get("logprobs")
    )


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
        whole, ended = await stream_of(agent, 1)
    else:
        again = asyncio.create_task(stream_of(agent, 1))
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


async def test_a_client_without_marks_ends_its_call(proxy: Proxy, engine: ScriptedEngine) -> None:
    agent = await agent_of(proxy, engine)
    engine.hold(3)
    await agent.leave(None)
    await until(lambda: engine.cancelled or engine.aborted, "the generation ends")
    await until(lambda: not agent.calls)
    # Nothing is left to be taken up.
    assert (await agent.ask(1)).status_code == 200
    assert len(engine.requests) == 2


async def test_a_call_that_nobody_comes_back_for_ends(start: Start, engine: ScriptedEngine) -> None:
    proxy = await start("server.retry_grace=0.05")
    await proxy.admit(5)
    agent = await agent_of(proxy, engine)
    engine.hold(3)
    await agent.leave(0)
    await until(lambda: engine.cancelled or engine.aborted, "the generation ends")
    await until(lambda: not agent.calls)
    assert (await agent.ask(1)).status_code == 200
    assert len(engine.requests) == 2


async def test_an_answer_that_nobody_comes_back_for_is_not_trained_on(
    start: Start, engine: ScriptedEngine
) -> None:
    proxy = await start("server.retry_grace=0.5")
    await proxy.admit(5)
    agent = await agent_of(proxy, engine)
    go_on = engine.hold(3)
    await agent.leave(0)
    await agent.vacant()
    go_on.set()
    await until(lambda: not agent.calls)
    assert (await agent.ask(1)).status_code == 200
    assert await agent.end() == ["undelivered", None]


async def test_nor_one_whose_session_ends_meanwhile(proxy: Proxy, engine: ScriptedEngine) -> None:
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
    proxy = await start("server.retry_grace=0.5")
    await proxy.admit(5)
    agent = await agent_of(proxy, engine)
    go_on = engine.hold(3)
    await agent.leave(0)
    await agent.vacant()
    go_on.set()
    await agent.answered()
    (recorded,) = await agent.recorded()
    messages = [*HELLO, recorded.output_message, {"role": "user", "content": "And?"}]
    await proxy.complete(agent.key, messages)
    await until(lambda: not agent.calls)
    assert await agent.end() == [None, None]


# -- over a restart ------------------------------------------------------------------------------


Restart = Callable[[], Awaitable[Proxy]]


@pytest.fixture
async def restart(
    tmp_path: Path, chat: ChatFormat, engine: ScriptedEngine
) -> AsyncIterator[Restart]:
    """End the proxy that runs, if one does, and start the next one on its journal."""
    async with AsyncExitStack() as stack:

        async def again() -> Proxy:
            await stack.aclose()
            context = running_proxy(config_for(tmp_path), chat, engine_url=engine.url)
            proxy = await stack.enter_async_context(context)
            await proxy.admit(5)
            return proxy

        yield again


async def nothing(_: Any) -> None:
    return None


async def unheard(restart: Restart, engine: ScriptedEngine, **fields: Any) -> Agent:
    """An agent of a proxy in its second life; its answer was recorded, not sent, in the first."""
    agent = await agent_of(await restart(), engine, **fields)
    go_on = engine.hold(3)
    await agent.leave(0)
    await agent.vacant()
    go_on.set()
    await agent.answered()
    agent.proxy = await restart()
    return agent


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
async def test_an_answer_of_an_earlier_process_that_was_used_is(
    restart: Restart, engine: ScriptedEngine, how: str
) -> None:
    agent = await unheard(restart, engine)
    proxy = agent.proxy
    (recorded,) = await agent.recorded()
    if how == "continued":
        messages = [*HELLO, recorded.output_message, {"role": "user", "content": "And?"}]
        await proxy.complete(agent.key, messages)
    else:
        reward = {"reward": 1.0, "completion_id": recorded.id}
        assert (await proxy.post("/rl/v1/set_reward", reward, agent.key)).status_code == 200
    assert set(await agent.end()) == {None}


@pytest.mark.parametrize("how", ["at once", "later", "at the end", "with the next write"])
async def test_what_was_delivered_stays_so(
    restart: Restart, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Its mark is written at once; if the store fails, with the next write, soon, or at the end."""
    if how != "at once":
        monkeypatch.setattr(Deliveries, "_write", nothing)
    if how != "later":
        monkeypatch.setattr(service, "_SWEEP_SECONDS", 3600.0)
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


# -- as OpenAI's SDK does it ------------------------------------------------------------------


def sdk_of(proxy: Proxy, session: dict[str, Any], **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(api_key=session["api_key"], base_url=f"{proxy.url}/v1", **options)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_openais_sdk_after_a_time_out(
    proxy: Proxy, engine: ScriptedEngine, stream: bool
) -> None:
    session = await proxy.open()
    at_once = 0 if stream else 3
    go_on = engine.hold(at_once)
    live = proxy.service.sessions.live[session["session_id"]]

    def taken_up() -> bool:
        return any(call.mark is not None and call.mark.retry_count >= 1 for call in live.calls)

    async with sdk_of(proxy, session, timeout=2.0, max_retries=8) as sdk:

        async def ask() -> tuple[str, str]:
            messages: Any = HELLO
            if not stream:
                done = await sdk.chat.completions.create(model="m", messages=messages, max_tokens=8)
                return done.id, done.choices[0].message.content or ""
            parts, id = [], ""
            async for chunk in await sdk.chat.completions.create(
                model="m", messages=messages, max_tokens=8, stream=True
            ):
                id = chunk.id
                parts += [choice.delta.content or "" for choice in chunk.choices]
            return id, "".join(parts)

        asked = asyncio.create_task(ask())
        await until(taken_up, "the SDK's retry takes the call up")
        go_on.set()
        id, text = await asked
    assert len(engine.requests) == 1
    (recorded,) = await proxy.recorded(session["session_id"])
    assert (id, text) == (recorded.id, recorded.output_message["content"])
