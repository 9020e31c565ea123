"""A group that teaches nothing, from its agents to its slots: dropped, counted, and refilled."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

from any_agent.chat import load_chat_format
from any_agent.client.rl_client import RLClient
from any_agent.rollout import LeaseExecutor
from tests.support.fixed_ranks import FixedRanks
from tests.support.proxy import LIMIT, Proxy, config_for, running_proxy, until
from tests.support.scripted_engine import ScriptedEngine
from trainer.batch import ZeroVarianceGroups


async def group(proxy: Proxy, name: str, *rewards: float) -> list[str]:
    """A group's sessions, opened by agents that wait for their slots, called and rewarded."""
    opens = [proxy.open(group_id=name, group_size=len(rewards), wait=LIMIT) for _ in rewards]
    sessions = await asyncio.gather(*opens)
    for session, reward in zip(sessions, rewards, strict=True):
        await proxy.complete(session["api_key"])
        body = {"final_reward": reward}
        assert (await proxy.post("/rl/v1/finalize", body, session["api_key"])).status_code == 200
    return [session["session_id"] for session in sessions]


async def state(proxy: Proxy, session_id: str) -> tuple[str, str | None]:
    info = (await proxy.http.get(f"/rl/v1/sessions/{session_id}")).json()
    return info["state"], info["reason"]


async def test_groups_without_variance_are_dropped_and_refilled(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    chat = load_chat_format(str(tiny_model_dir), enable_thinking=False)
    engine = ScriptedEngine(decode=chat.decode)
    # Slots for one group: the second one gets in because the first one was dropped.
    settings = ("rollout.batch_size=2", "rollout.max_concurrent=2", "rollout.eta=0")
    config = config_for(tmp_path, *settings)
    async with engine.serve() as url, running_proxy(config, chat, engine_url=url) as proxy:
        executor = LeaseExecutor(
            lambda: FixedRanks(RLClient(proxy.url)),
            config.rollout,
            owner="trainer",
            reject=ZeroVarianceGroups(config.train).reject_reason,
        )
        await asyncio.to_thread(executor.start)
        try:
            await asyncio.to_thread(executor.begin)
            equal: list[str] = []
            for k in range(3):
                equal += await group(proxy, f"equal-{k}", 1.0, 1.0)
            telling = await group(proxy, "telling", 0.0, 1.0)
            batch = await asyncio.to_thread(executor.prepare_batch, LIMIT)
            assert sorted(t.session_id for t in batch[0]) == sorted(telling) and len(batch) == 1
            for session_id in equal:
                await until(partial(is_rejected, proxy, session_id), "the rejection")
            assert executor.rejected == {"zero_variance": 6}
            now = await proxy.capacity()
            # Every dropped session gave its place to another one, and the batch waits.
            assert (now["admitted"], now["limit"], now["buffered"]) == (8, 8, 2)
            await asyncio.to_thread(executor.ack, telling, [])
            assert (await state(proxy, telling[0]))[0] == "trained"
            await until(lambda: proxy.service.sessions.admission.limit == 10, "the next batch")
        finally:
            await asyncio.to_thread(executor.stop)


async def is_rejected(proxy: Proxy, session_id: str) -> bool:
    return await state(proxy, session_id) == ("rejected", "zero_variance")
