"""The examples of docs/how-to/agents-in-training.md, run as they are written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from any_agent.chat import ChatFormat
from any_agent.workflow import AgentService, OpenAIProxyWorkflow
from tests.support.proxy import Proxy
from tests.support.scripted_engine import ScriptedEngine
from tests.support.workflow.agents import HELLO, MyAgent
from tests.workflow.conftest import ADMIN

DOCUMENT = Path(__file__).parents[2] / "docs" / "how-to" / "agents-in-training.md"
AGENT, REWARD, CLIENT, EPISODE = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)


async def test_the_documented_agent_gets_its_discounted_rewards(
    proxy: Proxy, scripted: ScriptedEngine, chat: ChatFormat
) -> None:
    names: dict[str, Any] = {}
    exec(AGENT, names)
    agent = names["MathAgent"](turns=3)
    for text in ("five", "4"):
        scripted.say([*chat.encode(text, special=False), chat.stop_token_ids[0]])
    service = AgentService(proxy.url, ADMIN, discount=0.5)
    item = {"messages": [{"role": "user", "content": "2 + 2?"}], "answer": "4"}
    result = await OpenAIProxyWorkflow.of(agent, service).arun_episode(None, item)
    assert result is not None
    assert [interaction.reward for interaction in result.values()] == [0.5, 1.0]


async def test_the_documented_session_by_hand_exports_its_reward(proxy: Proxy) -> None:
    names: dict[str, Any] = {}
    exec(CLIENT, names)

    async def play(url: str) -> float:
        async with AsyncOpenAI(base_url=url, api_key="DUMMY") as client:
            await client.chat.completions.create(
                model="x", messages=[{"role": "user", "content": "hello"}], max_tokens=4
            )
        return 0.5

    result = await names["one_episode"](proxy.url, ADMIN, play)
    assert [interaction.reward for interaction in result.values()] == [0.5]


async def test_the_documented_episode_of_a_subclass_shapes_its_reward(proxy: Proxy) -> None:
    names: dict[str, Any] = {}
    exec(EPISODE, names)
    workflow = names["Shaped"](
        agent=MyAgent(turns=2), proxy_addr=f"{proxy.url}/v1", admin_api_key=ADMIN, discount=0.5
    )
    item = {"messages": HELLO, "hints": ["it is small"]}
    result = await workflow.arun_episode(None, item)
    assert [one.reward for one in result.values()] == pytest.approx([0.45, 0.9])
    assert proxy.service.sessions.grants.left == 0
