"""kill -9 of the proxy between a finalize's 2xx and the lease: the trajectory is trained on."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import openai

from any_agent.client import RLClient
from any_agent.errors import ServiceUnavailable
from any_agent.launcher import Node, NodeOptions
from any_agent.protocol import SessionStarted
from tests.e2e.live_run import live_config, recompute, recorded


async def play(client: RLClient, session: SessionStarted, reward: float) -> None:
    """One call, its reward, the end."""
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as agent:
        talk = [{"role": "user", "content": "hello"}]
        await agent.chat.completions.create(model="any", messages=talk)  # type: ignore[arg-type]
    await client.set_reward(session.api_key, reward)
    assert (await client.finalize(session.api_key)).state == "finalized"


async def back(node: Node, client: RLClient) -> None:
    """Let the launcher start the proxy again, and wait until it answers."""
    async with asyncio.timeout(60):
        while True:
            node.check()
            try:
                await client.run_info()
                return
            except ServiceUnavailable:
                continue


async def run(node: Node) -> list[str]:
    """Three of four finalize, the proxy is killed, the fourth finalizes; the ids."""
    async with RLClient(node.url, retry_for=1) as client:
        opening = {"group_id": "g", "group_size": 4, "wait": 60.0}
        sessions = [await client.start_session(**opening) for _ in range(4)]
        for session, reward in zip(sessions[:3], (0.0, 1.0, 0.0), strict=True):
            await play(client, session, reward)
        os.kill(node.proxy.pid, signal.SIGKILL)
        await back(node, client)
        # The open session goes on under its old key.
        await play(client, sessions[3], 1.0)
    return [session.session_id for session in sessions]


def test_what_was_finalized_before_a_kill_is_trained(tmp_path: Path, tiny_model_dir: Path) -> None:
    config = live_config(
        tmp_path,
        tiny_model_dir,
        **{"rollout.batch_size": 4, "rollout.max_concurrent": 4, "train.steps": 1},
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
