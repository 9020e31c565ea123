"""The proxy is killed after it acknowledged a trajectory: it is leased after the restart.

Real processes: the embedded engine, and the proxy with LiteLLM.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import openai

from any_agent.client.rl_client import RLClient
from any_agent.record import InteractionTree, unpack_trajectories
from tests.support.ports import own_port
from tests.support.real_parts import embedded_engine, proxy_process, write_config

USER = {"role": "user", "content": "Which digit?"}


async def episode(client: RLClient, turns: int) -> tuple[str, str]:
    """A session with some turns, open; its id and key."""
    session = await client.start_session(task_id="t", group_size=1)
    messages = [USER]
    async with openai.AsyncOpenAI(
        base_url=session.base_url, api_key=session.api_key, max_retries=0
    ) as sdk:
        for turn in range(turns):
            if turn % 2:
                text = ""
                stream = await sdk.chat.completions.create(
                    model="m", messages=messages, max_tokens=16, stream=True
                )
                async for chunk in stream:
                    text += chunk.choices[0].delta.content or ""
            else:
                completion = await sdk.chat.completions.create(
                    model="m", messages=messages, max_tokens=16
                )
                text = completion.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": text}, USER]
    return session.session_id, session.api_key


def kill(process: subprocess.Popen[bytes]) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


@dataclass(slots=True)
class Crowd:
    """Agents that never stop, and what they were told that is done."""

    answered: set[str] = field(default_factory=set)
    finalized: set[str] = field(default_factory=set)
    enough: asyncio.Event = field(default_factory=asyncio.Event)

    async def agent(self, client: RLClient) -> None:
        while True:
            session = await client.start_session()
            async with openai.AsyncOpenAI(
                base_url=session.base_url, api_key=session.api_key, max_retries=0
            ) as sdk:
                await sdk.chat.completions.create(model="m", messages=[USER], max_tokens=8)  # type: ignore[list-item]
            self.answered.add(session.session_id)
            await client.finalize(session.api_key, 1.0)
            self.finalized.add(session.session_id)
            if len(self.finalized) >= 20:
                self.enough.set()


async def test_kill_9(tiny_model_dir: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, tiny_model_dir)
    port = own_port()
    crowd = Crowd()
    with embedded_engine(tiny_model_dir, own_port(), tmp_path) as engine_url:
        with proxy_process(config, engine_url, port) as (process, url):
            client = RLClient(url, retry_for=0)
            await client.set_capacity(limit=1000, ttl=600, owner="trainer", held=[])
            leased_id, leased_key = await episode(client, 1)
            await client.finalize(leased_key, 0.25)
            assert await client.lease(owner="trainer", wait=60) is not None
            open_id, open_key = await episode(client, 2)
            rewarded_id, rewarded_key = await episode(client, 1)
            await client.set_reward(rewarded_key, 0.75)
            final_id, final_key = await episode(client, 3)
            assert (await client.finalize(final_key, 0.5)).state == "finalized"
            agents = [asyncio.create_task(crowd.agent(client)) for _ in range(8)]
            async with asyncio.timeout(240):
                await crowd.enough.wait()
            kill(process)
            await asyncio.gather(*agents, return_exceptions=True)
        with proxy_process(config, engine_url, port):
            # The trainer renews what it holds, and gets what it does not.
            await client.set_capacity(limit=1000, ttl=600, owner="trainer", held=[leased_id])
            # Open sessions go on under their keys, with the rewards that were acknowledged.
            info = await client.finalize(rewarded_key)
            assert (info.session_id, list(info.rewards.values())) == (rewarded_id, [0.75])
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=open_key) as sdk:
                await sdk.chat.completions.create(model="m", messages=[USER], max_tokens=4)  # type: ignore[list-item]
            assert (await client.finalize(open_key, 1.0)).interactions == 3
            got = {}
            while packed := await client.lease(owner="trainer", wait=0, max_groups=100):
                got |= {t.session_id: t for t in unpack_trajectories(packed)}
            assert got.keys() >= crowd.finalized | {final_id, rewarded_id, open_id}
            assert leased_id not in got
            trajectory = got[final_id]
            assert (trajectory.final_reward, len(trajectory.interactions)) == (0.5, 3)
            InteractionTree.from_interactions(trajectory.interactions)
            acked = await client.ack(owner="trainer", trained=[final_id, leased_id], rejected=[])
            assert acked == 2
            async with httpx.AsyncClient(base_url=url, timeout=120) as http:
                for session_id in crowd.answered:
                    info = (await http.get(f"/rl/v1/sessions/{session_id}")).json()
                    assert info["interactions"] == 1  # type: ignore[index]
            await litellm_behind_the_allowlist(url)
    await client.close()


async def litellm_behind_the_allowlist(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        for path in (
            "/settings",
            "/routes",
            "/debug/asyncio-tasks",
            "/key/generate",
            "/model/info",
            "/ui/",
            "/get/config/callbacks",
            "/",
        ):
            for headers in ({}, {"Authorization": "Bearer sk-1234"}):
                response = await http.get(path, headers=headers)
                assert response.status_code == 404, path
                assert response.json()["error"]["code"] == "not_found"
