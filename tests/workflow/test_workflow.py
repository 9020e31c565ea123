from __future__ import annotations

import asyncio

import pytest

from any_agent.client.rl_client import RLClient
from any_agent.errors import ConfigError, ServiceUnavailable
from any_agent.record import pack_trajectories
from any_agent.types import Trajectory
from any_agent.workflow import ProxyWorkflow, RolloutWorkflow
from tests.support.errors import fails_with


class ScriptedClient(RLClient):
    """Answers polls from a list; then blocks."""

    def __init__(self, answers: list[bytes | None]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, float, int]] = []
        self.blocked = asyncio.Event()

    async def lease(self, *, owner: str, wait: float, max_groups: int = 1) -> bytes | None:
        self.asked.append((owner, wait, max_groups))
        if not self.answers:
            self.blocked.set()
            await asyncio.Event().wait()
        return self.answers.pop(0)


async def test_an_episode_waits_until_external_agents_have_closed_a_group() -> None:
    group = [Trajectory(f"s{k}", "g", [], final_reward=float(k)) for k in range(2)]
    client = ScriptedClient([None, None, pack_trajectories(group)])
    workflow = ProxyWorkflow(client, owner="me", poll=7.0)
    assert isinstance(workflow, RolloutWorkflow)
    episode = await workflow.arun_episode(None, None)
    assert [(t.session_id, t.final_reward) for t in episode] == [("s0", 0.0), ("s1", 1.0)]
    assert client.asked == [("me", 7.0, 1)] * 3


async def test_a_waiting_episode_ends_at_once_when_cancelled() -> None:
    client = ScriptedClient([None])
    task = asyncio.create_task(ProxyWorkflow(client, owner="me").arun_episode(None, None))
    async with asyncio.timeout(60):
        await client.blocked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 60)


async def test_a_proxy_workflow_refuses_dataset_items_and_has_its_own_name() -> None:
    client = ScriptedClient([pack_trajectories([Trajectory("s", "g", [])])])
    workflow = ProxyWorkflow(client)
    with pytest.raises(ConfigError):
        await workflow.arun_episode(None, {"messages": []})
    assert len(await workflow.arun_episode(None, None)) == 1
    assert client.asked == [(workflow.owner, 30.0, 1)]
    assert workflow.owner != ProxyWorkflow(client).owner


async def test_a_proxy_workflow_can_be_made_from_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    async def lease(client: RLClient, *, owner: str, wait: float) -> bytes:
        raise ServiceUnavailable(f"{client.url} {owner}")

    monkeypatch.setattr(RLClient, "lease", lease)
    with fails_with(ServiceUnavailable, "http://127.0.0.1:9 me"):
        await ProxyWorkflow("http://127.0.0.1:9/v1", owner="me").arun_episode(None, None)
