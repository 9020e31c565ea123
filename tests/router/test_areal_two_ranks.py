"""A client written for AReaL, over a router and two real proxies."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from any_agent.chat import ChatFormat
from any_agent.client.rl_client import RLClient
from any_agent.keys import rank_of_session
from any_agent.workflow import AgentService, GroupedRolloutWorkflow, OpenAIProxyWorkflow, context
from any_agent.workflow.context import WorkflowContext
from tests.router.test_two_ranks import Pair, running_pair
from tests.support.areal_client import ArealClient, Episode
from tests.support.workflow.agents import HELLO, MyAgent

ADMIN = "operator-secret"


@pytest.fixture
async def pair(tmp_path: Path, chat: ChatFormat) -> AsyncIterator[Pair]:
    async with running_pair(tmp_path, chat, f"server.admin_key={ADMIN}") as pair:
        yield pair


async def played(episode: Episode, reward: float) -> None:
    await episode.chat("x")
    await episode.set_last_reward(reward)
    assert await episode.end() == {"message": "success", "interaction_count": 1}


async def test_episodes_go_where_slots_were_granted(pair: Pair) -> None:
    async with ArealClient(pair.url, ADMIN) as client:
        assert await client.health() == {"status": "ok", "workers": 2}
        for _ in range(4):
            await client.grant_capacity()
        episodes = [await client.start_when_there_is_room("task") for _ in range(4)]
        ids = sorted(episode.session_id for episode in episodes)
        assert ids == ["task-0-0", "task-0-1", "task-1-0", "task-1-1"]
        for k, episode in enumerate(episodes):
            await played(episode, float(k))
        for k, episode in enumerate(episodes):
            rows = await client.export(episode.session_id)
            assert [row["reward"] for row in rows.values()] == [float(k)]


async def test_a_tasks_slots_are_granted_where_its_sessions_live(pair: Pair) -> None:
    """So the runs of one item share one engine's cache, and its group one baseline's rank."""
    service = AgentService(pair.url, ADMIN)
    workflow = GroupedRolloutWorkflow(OpenAIProxyWorkflow.of(MyAgent(), service), 4)
    homes = set()
    for task in range(6):
        with context.use(WorkflowContext(task_id=task)):
            result = await workflow.arun_episode(None, {"messages": HELLO})  # type: ignore[arg-type]
        assert result is not None
        assert len(result) == 4
        async with RLClient(pair.url, admin_key=ADMIN) as client:
            found = [line.session_id async for line in client.sessions()]
        found = [id for id in found if id.startswith(f"{task}-")]
        ranks = {rank_of_session(id) for id in found}
        assert len(found) == 4
        assert len(ranks) == 1
        homes |= ranks
    assert homes == {0, 1}
    await context.close_clients()
