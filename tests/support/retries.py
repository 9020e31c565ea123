"""Agents whose SDK marks its retries, and what they do to a proxy."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import orjson

from any_agent.types import Interaction
from proxy_ext.calls.call import Call
from tests.support.proxy import HELLO, Proxy, until
from tests.support.proxy_fixtures import Restart
from tests.support.scripted_engine import ScriptedEngine

PATH = "/v1/chat/completions"


class Agent:
    """Sends one body again and again, marked or not."""

    def __init__(
        self,
        proxy: Proxy,
        engine: ScriptedEngine,
        session: dict[str, Any],
        path: str = PATH,
        **fields: Any,
    ) -> None:
        self.proxy = proxy
        self.engine = engine
        self.path = path
        self.key = session["api_key"]
        self.id = session["session_id"]
        talk = {"messages": HELLO, "max_tokens": 8} if path == PATH else {}
        self.body = orjson.dumps({"model": "m", **talk, **fields})

    def other(self, **fields: Any) -> Agent:
        """The same session's, with another body."""
        session = {"api_key": self.key, "session_id": self.id}
        return Agent(self.proxy, self.engine, session, **fields)

    def headers(self, count: int | None) -> dict[str, str]:
        marked = {} if count is None else {"x-stainless-retry-count": str(count)}
        return {"authorization": f"Bearer {self.key}", **marked}

    async def ask(self, count: int | None) -> httpx.Response:
        return await self.proxy.http.post(self.path, content=self.body, headers=self.headers(count))

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
        await until(lambda: all(call.answered for call in self.calls))

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


async def left(proxy: Proxy, engine: ScriptedEngine, **fields: Any) -> tuple[Agent, asyncio.Event]:
    """An agent whose client has left its call, and what the engine goes on with."""
    agent = await agent_of(proxy, engine, **fields)
    go_on = engine.hold(3)
    await agent.leave(0)
    await agent.vacant()
    return agent, go_on


async def left_with_an_answer(proxy: Proxy, engine: ScriptedEngine, **fields: Any) -> Agent:
    """One whose answer was recorded after its client had left."""
    agent, go_on = await left(proxy, engine, **fields)
    go_on.set()
    await agent.answered()
    return agent


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
            if line.startswith("data: "):
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


async def unheard(restart: Restart, engine: ScriptedEngine, **fields: Any) -> Agent:
    """An agent of a proxy in its second life; its answer was recorded, not sent, in the first."""
    agent = await left_with_an_answer(await restart(), engine, **fields)
    agent.proxy = await restart()
    return agent
