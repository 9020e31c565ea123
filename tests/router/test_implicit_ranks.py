"""Agents that open no sessions, at a service of two ranks of which everything is started again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai

from any_agent.chat import ChatFormat
from any_agent.keys import rank_of_session
from tests.router.test_two_ranks import Pair, running_pair
from tests.support.implicit import settings
from tests.support.proxy import LIMIT

AGENTS = 6


class Agent:
    """One conversation, over two APIs."""

    def __init__(self, client: openai.AsyncOpenAI, number: int) -> None:
        self._client = client
        self._talk: list[Any] = [{"role": "user", "content": f"Task {number}"}]
        self._last = ""
        self.sessions: set[str] = set()

    async def chat(self) -> None:
        raw = await self._client.chat.completions.with_raw_response.create(
            model="m", messages=self._talk, max_tokens=16
        )
        self._add(raw.headers, raw.parse().choices[0].message.content or "")

    async def respond(self, *, named: bool) -> None:
        """With all that was said, or with the last answer's name."""
        asked: dict[str, Any] = {"input": self._talk}
        if named:
            asked = {"input": self._talk[-1]["content"], "previous_response_id": self._last}
        raw = await self._client.responses.with_raw_response.create(
            model="m", max_output_tokens=16, **asked
        )
        response = raw.parse()
        self._last = response.id
        self._add(raw.headers, response.output_text)

    async def again(self) -> None:
        """The last response once more."""
        response = await self._client.responses.retrieve(self._last)
        assert response.output_text in [message["content"] for message in self._talk]

    def _add(self, headers: Any, text: str) -> None:
        self.sessions.add(headers["x-any-agent-session"])
        self._talk += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": "And then?"},
        ]


async def test_conversations_stay_where_they_are(tmp_path: Path, chat: ChatFormat) -> None:
    async with running_pair(tmp_path, chat, *settings()) as pair:
        await pair.admit(50)
        async with client_of(pair) as client:
            agents = [Agent(client, k) for k in range(AGENTS)]
            for agent in agents:
                await agent.chat()
                await agent.respond(named=False)
            for part in ("router", "rank-0", "rank-1"):
                await pair.end(part)
            await pair.start_rank(0)
            await pair.start_rank(1)
            await pair.start_router()
        await pair.admit(50)
        async with client_of(pair) as client:
            for agent in agents:
                agent._client = client
                await agent.respond(named=True)
                await agent.again()
                await agent.chat()
        assert [len(agent.sessions) for agent in agents] == [1] * AGENTS
        live = [proxy.service.sessions.live for proxy in pair.proxies.values()]
        assert sum(map(len, live)) == AGENTS
        assert {rank_of_session(id) for agent in agents for id in agent.sessions} == {0, 1}
        for sessions in live:
            for session in sessions.values():
                assert [str(i.continuation) for i in session.tree] == ["root", *["exact"] * 3]


def client_of(pair: Pair) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{pair.url}/v1", api_key="sk-anything", timeout=LIMIT, max_retries=0
    )
