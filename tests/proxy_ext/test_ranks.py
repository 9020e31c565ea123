"""Two real proxies and the trainer's executor: head-room goes where it is asked for, and ends."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from any_agent.chat import ChatFormat
from any_agent.config import Config
from any_agent.launcher.trial import trial_dir
from any_agent.rollout import LeaseExecutor, RankClients
from any_agent.rollout import capacity_keeper as module
from any_agent.rundir.fleet import FleetFile
from any_agent.rundir.registry import RegistryEntry, publish, rank_name
from tests.support.proxy import Proxy, config_for, running_proxy, until
from tests.support.scripted_engine import ScriptedEngine


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return config_for(tmp_path, "rollout.batch_size=4", "rollout.max_concurrent=8", "rollout.eta=0")


@pytest.fixture
async def proxies(
    config: Config, chat: ChatFormat, engine: ScriptedEngine
) -> AsyncIterator[list[Proxy]]:
    async with (
        running_proxy(config, chat, engine_url=engine.url, rank=0) as zero,
        running_proxy(config, chat, engine_url=engine.url, rank=1) as one,
    ):
        for rank, proxy in enumerate((zero, one)):
            entry = RegistryEntry(name=rank_name(rank), boot_id="b", url=proxy.url, pid=os.getpid())
            publish(trial_dir(config).registry, entry)
        yield [zero, one]


@pytest.fixture
async def executor(config: Config, proxies: list[Proxy]) -> AsyncIterator[LeaseExecutor]:
    executor = LeaseExecutor(
        lambda: RankClients(trial_dir(config).registry, FleetFile(None, 2), retry_for=5),
        config.rollout,
        owner="trainer",
    )
    await asyncio.to_thread(executor.start)
    yield executor
    if any(thread.name == "rollout" for thread in threading.enumerate()):
        await asyncio.to_thread(executor.stop)


def limits(proxies: list[Proxy]) -> list[int]:
    return [proxy.service.sessions.admission.limit for proxy in proxies]


async def test_slots_go_to_the_rank_that_is_asked(
    proxies: list[Proxy], executor: LeaseExecutor
) -> None:
    zero, one = proxies
    await asyncio.to_thread(executor.begin)
    await until(lambda: limits(proxies) == [2, 2])
    # A group of four fits nowhere, until the other rank's share is taken back.
    first = await one.open(group_id="g", group_size=4, wait=60)
    assert limits(proxies) == [0, 4]
    rest = [await one.open(group_id="g", group_size=4) for _ in range(3)]
    # With eta 0 that is all before the next weights.
    refused = await zero.http.post("/rl/v1/start_session", json={"group_id": "h", "group_size": 2})
    assert refused.status_code == 429
    waiting = asyncio.create_task(zero.open(group_id="i", group_size=2, wait=60))
    for k, session in enumerate([first, *rest]):
        await one.complete(session["api_key"])
        await one.post("/rl/v1/finalize", {"final_reward": k}, session["api_key"])
    (group,) = await asyncio.to_thread(executor.prepare_batch, 15.0)
    ids = [t.session_id for t in group]
    assert ids == [session["session_id"] for session in (first, *rest)]
    # Trained on, but not acknowledged: the weights may not be everywhere yet.
    before = executor.capacity
    await until(lambda: executor.capacity is not before)
    assert not waiting.done()
    await asyncio.to_thread(executor.ack, ids, [])
    assert (await waiting)["group_id"] == "i"


async def test_a_trainer_that_stops_leaves_opens_a_429(
    proxies: list[Proxy], executor: LeaseExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TTL", 2.0)
    await asyncio.to_thread(executor.begin)
    await until(lambda: limits(proxies) == [2, 2])
    for proxy in proxies:
        await proxy.open(wait=60)
    await asyncio.to_thread(executor.stop)
    await until(lambda: limits(proxies) == [1, 1])
    for proxy in proxies:
        response = await proxy.http.post("/rl/v1/start_session", json={"wait": 0.05})
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        # Others are none of its business, and nothing is dropped.
        await proxy.open(mode="eval")
        (session,) = [s for s in proxy.service.sessions.live.values() if s.mode == "train"]
        assert session.state == "open"


async def test_before_the_trainer_begins_nothing_is_admitted(
    proxies: list[Proxy], executor: LeaseExecutor
) -> None:
    # An earlier trainer's word would still hold.
    for proxy in proxies:
        await proxy.admit(3, owner="earlier")
    await until(lambda: limits(proxies) == [0, 0])
    for proxy in proxies:
        response = await proxy.http.post("/rl/v1/start_session", json={})
        assert response.status_code == 429
