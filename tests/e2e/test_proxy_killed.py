"""kill -9 of a proxy between a finalize's 2xx and the lease: the trajectory is trained on."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import openai
import pytest

from any_agent.client.rl_client import RLClient
from any_agent.keys import rank_of_session
from any_agent.launcher import Node, NodeOptions
from any_agent.protocol.rl import SessionInfo, SessionStarted
from any_agent.rundir.registry import rank_name
from tests.support.e2e.live_run import live_config, looked_after, recompute, recorded
from tests.support.waiting import until

REWARDS = [0.0, 1.0, 0.0, 1.0]


async def play(client: RLClient, session: SessionStarted, reward: float) -> None:
    """One call, its reward, the end."""
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as agent:
        talk = [{"role": "user", "content": "hello"}]
        await agent.chat.completions.create(model="any", messages=talk)  # type: ignore[arg-type]
    await client.set_reward(session.api_key, reward)
    assert (await client.finalize(session.api_key)).state == "finalized"


async def kill_and_wait(node: Node, name: str) -> None:
    """Let the launcher start the part again, until it is ready."""
    part = node.parts[name]
    os.kill(part.pid, signal.SIGKILL)
    async with looked_after(node):
        await until(lambda: part.restarts and part.state == "ready", name, within=240)


async def run(node: Node) -> list[str]:
    """Play a group on each rank; one rank's proxy is killed when only one session is open.

    Three of that group's four sessions are finalized before it, the fourth after it. Return the
    sessions' ids.
    """
    async with RLClient(node.url) as client:
        groups = []
        for name in ("g", "h"):
            opening = {"group_id": name, "group_size": 4, "wait": 60.0}
            groups.append([await client.start_session(**opening) for _ in range(4)])
        homes = [{rank_of_session(session.session_id) for session in group} for group in groups]
        assert sorted(homes, key=str) == [{0}, {1}], "each rank has a whole group"
        for session, reward in zip(groups[1], REWARDS, strict=True):
            await play(client, session, reward)
        for session, reward in zip(groups[0][:3], REWARDS, strict=False):
            await play(client, session, reward)
        (home,) = homes[0]
        assert home is not None
        await kill_and_wait(node, rank_name(home))
        # The open session goes on under its old key.
        await play(client, groups[0][3], REWARDS[3])
    return [session.session_id for group in groups for session in group]


@pytest.mark.gate
def test_what_two_ranks_recorded_is_trained_though_one_is_killed(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    config = live_config(
        tmp_path,
        tiny_model_dir,
        **{"rollout.batch_size": 8, "rollout.max_concurrent": 8, "train.steps": 1},
    )
    assert config.server.ranks == 2
    with Node(config, NodeOptions(say=lambda _: None)) as node:
        ids = asyncio.run(run(node))
        node.watch(until_trained=True)
        infos = asyncio.run(infos_of(node, ids))
    assert [info.state for info in infos] == ["trained"] * 8
    assert [list(info.rewards.values()) for info in infos] == [[reward] for reward in 2 * REWARDS]
    checks = recompute(config, recorded(config))
    assert len(checks) == 8
    assert max(check.error for check in checks) < 1e-4


async def infos_of(node: Node, ids: list[str]) -> list[SessionInfo]:
    async with RLClient(node.url) as client:
        return [await client.session_info(session_id) for session_id in ids]
