"""kill -9 of the proxy between a finalize's 2xx and the lease: the trajectory is trained on."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import openai

from any_agent.client.rl_client import RLClient
from any_agent.keys import rank_of_session
from any_agent.launcher import Node, NodeOptions
from any_agent.protocol.rl import SessionStarted
from any_agent.rundir.registry import rank_name
from tests.support.e2e.live_run import live_config, recompute, recorded


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
    async with asyncio.timeout(240):
        while part.restarts == 0 or part.state != "ready":
            node.check()
            await asyncio.sleep(0.05)


async def run(node: Node) -> list[str]:
    """Three of four finalize, their rank's proxy is killed, the fourth finalizes; the ids."""
    async with RLClient(node.url) as client:
        opening = {"group_id": "g", "group_size": 4, "wait": 60.0}
        sessions = [await client.start_session(**opening) for _ in range(4)]
        (home,) = {rank_of_session(session.session_id) for session in sessions}
        assert home is not None
        for session, reward in zip(sessions[:3], (0.0, 1.0, 0.0), strict=True):
            await play(client, session, reward)
        await kill_and_wait(node, rank_name(home))
        # The open session goes on under its old key.
        await play(client, sessions[3], 1.0)
    return [session.session_id for session in sessions]


def test_what_was_finalized_before_a_kill_is_trained(tmp_path: Path, tiny_model_dir: Path) -> None:
    config = live_config(
        tmp_path,
        tiny_model_dir,
        **{
            "server.ranks": 1,
            "rollout.batch_size": 4,
            "rollout.max_concurrent": 4,
            "train.steps": 1,
        },
    )
    with Node(config, NodeOptions(say=lambda _: None)) as node:
        ids = asyncio.run(run(node))
        node.watch(until_trained=True)
        states = asyncio.run(states_of(node, ids))
    assert states == ["trained"] * 4
    assert max(check.error for check in recompute(config, recorded(config))) < 1e-4


async def states_of(node: Node, ids: list[str]) -> list[str]:
    async with RLClient(node.url) as client:
        return [(await client.session_info(session_id)).state for session_id in ids]
