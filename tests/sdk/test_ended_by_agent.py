"""Agents that reward and finalize their own sessions, by clients that know only a URL."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest

from any_agent import AgentRunner, AgentSession
from any_agent.chat import ChatFormat
from any_agent.client.environment import PLACEHOLDER_KEY
from any_agent.errors import SessionClosed
from tests.support.errors import fails_with
from tests.support.proxy import config_for, running_proxy
from tests.support.scripted_engine import ScriptedEngine
from tests.support.sdk.runner import leased, places
from tests.support.sdk_fixtures import Served


class Finisher:
    """One call, a reward for it, and the end of the session."""

    def __init__(self, final: float = 1.0, **end: Any) -> None:
        self.end = end or {"final_reward": final}
        self.answered: list[int] = []

    async def run(self, prompt: str) -> None:
        async with aiohttp.ClientSession(base_url=os.environ["OPENAI_BASE_URL"]) as http:
            messages = [{"role": "user", "content": prompt}]
            body = {"model": "x", "messages": messages, "max_tokens": 4}
            answer = await http.post("/v1/chat/completions", json=body)
            reward = {"completion_id": (await answer.json())["id"], "reward": 0.5}
            await http.post("/rl/v1/set_reward", json=reward)
            await self.finish(http)

    async def finish(self, http: aiohttp.ClientSession) -> None:
        ended = await http.post("/rl/v1/finalize", json=self.end)
        self.answered.append(ended.status)


@pytest.fixture
def here(served: Served, monkeypatch: pytest.MonkeyPatch) -> Served:
    """The environment names the service without `/v1`."""
    monkeypatch.setenv("OPENAI_BASE_URL", served.url)
    return served


async def test_leaving_a_session_that_its_agent_has_finalized_changes_nothing(here: Served) -> None:
    agent = Finisher()
    async with AgentSession() as session:
        await agent.run("Say 1.")
        # A trainer may have it by then.
        assert len(await here.proxy.lease()) == 1
    info = await here.info(session.session_id)
    assert agent.answered == [200]
    assert (info["state"], info["final_reward"]) == ("leased", 1.0)
    assert list(info["rewards"].values()) == [0.5]


async def test_a_session_ended_by_another_client_is_seen_as_ended(here: Served) -> None:
    async with AgentSession() as session:
        await Finisher(await_reward=True).run("Say 1.")
        async with httpx.AsyncClient(base_url=session.session_url) as http:
            (await http.post("/rl/v1/finalize", json={})).raise_for_status()
    assert await here.state(session.session_id) == "finalized"
    # Of an abort nobody knows here whose it was.
    with fails_with(SessionClosed, "no good"):
        async with AgentSession() as session, httpx.AsyncClient(base_url=here.url) as http:
            headers = {"Authorization": f"Bearer {session.api_key}"}
            path = f"/rl/v1/sessions/{session.session_id}/abort"
            (await http.post(path, json={"reason": "no good"}, headers=headers)).raise_for_status()
    info = await here.info(session.session_id)
    assert (info["state"], info["reason"]) == ("aborted", "no good")


async def test_a_runner_accepts_agents_that_finalize_their_own_sessions(here: Served) -> None:
    agent = Finisher()
    results = await AgentRunner(progress=False).run(agent.run, ["Say 1.", "Say 2."])
    assert agent.answered == [200] * 16
    assert [(r.state, r.reward, r.attempts) for r in results] == [("finalized", 1.5, 1)] * 16
    groups = places(await leased(here.proxy))
    assert [len(members) for members in groups.values()] == [8, 8]


class FinishesAndFails(Finisher):
    async def run(self, prompt: str) -> None:
        await super().run(prompt)
        raise OSError("its log file is gone")


class FinishesAndReturns(Finisher):
    async def run(self, prompt: str) -> float:  # type: ignore[override]
        await super().run(prompt)
        return 7.0


@pytest.mark.parametrize("kind", [FinishesAndFails, FinishesAndReturns])
async def test_requests_behind_the_end_of_a_session_change_nothing(
    here: Served, kind: type[Finisher]
) -> None:
    agent = kind()
    results = await AgentRunner(progress=False, group_size=2).run(agent.run, ["Say 1."])
    assert [(r.state, r.reward, r.attempts) for r in results] == [("finalized", 1.5, 1)] * 2
    assert agent.answered == [200, 200]


@pytest.mark.parametrize("key", ["sk-proj-1234567890", PLACEHOLDER_KEY, ""])
async def test_an_agent_may_use_any_key_at_a_service_that_needs_none(
    tmp_path: Path,
    chat: ChatFormat,
    engine: ScriptedEngine,
    monkeypatch: pytest.MonkeyPatch,
    key: str,
) -> None:
    for name in ("ANY_AGENT_URL", "ANY_AGENT_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", key)
    async with running_proxy(config_for(tmp_path), chat, engine_url=engine.url) as proxy:
        await proxy.admit(8)
        monkeypatch.setenv("OPENAI_BASE_URL", proxy.url)
        results = await AgentRunner(progress=False, group_size=1).run(Finisher().run, ["Say 1."])
    assert results.rewards == [1.5]
