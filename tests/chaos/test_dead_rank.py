"""A rank that is gone: within ten seconds new sessions are opened on the others, and only there.

Opens without a group and without an `Idempotency-Key`, that is: those have a home, and wait for it.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import httpx

from any_agent.keys import rank_of_session
from tests.chaos.conftest import Figure
from tests.chaos.test_idempotency import Cluster, running_cluster
from tests.support.chaos.killable import engine_in_thread
from tests.support.proxy import LIMIT, until

BOUND = 10.0
AGENTS = 8
OPENS = 5


async def opened(service: httpx.AsyncClient) -> tuple[int | None, float]:
    """The rank of one open, and how long its agent waited, tries that failed included."""
    began = time.monotonic()
    while True:
        answer = await service.post("/rl/v1/start_session", json={"mode": "eval"})
        if answer.status_code == 200:
            session = answer.json()["session_id"]
            return rank_of_session(session), time.monotonic() - began
        assert answer.status_code in (502, 503), answer.text
        assert time.monotonic() - began < LIMIT, answer.text
        await asyncio.sleep(0.1)


async def all_open(service: httpx.AsyncClient) -> tuple[set[int | None], float]:
    """The ranks of many opens at once, and the longest wait."""
    done = await asyncio.gather(*(opened(service) for _ in range(AGENTS * OPENS)))
    return {rank for rank, _ in done}, max(seconds for _, seconds in done)


async def die_and_come_back(cluster: Cluster, service: httpx.AsyncClient, dead: int) -> float:
    rank = cluster.ranks[dead]
    assert (await all_open(service))[0] == {0, 1}
    # At the moment of its death, with opens under way.
    waiting = asyncio.create_task(all_open(service))
    await asyncio.to_thread(rank.close)
    after = time.monotonic()
    _, slowest = await waiting
    others, later = await all_open(service)
    assert others == {1 - dead}
    assert max(slowest, later) < BOUND and time.monotonic() - after < 2 * BOUND
    await asyncio.to_thread(rank.start)

    async def both() -> bool:
        return (await all_open(service))[0] == {0, 1}

    await until(both, "the rank that is back gets sessions again")
    return max(slowest, later)


async def test_new_sessions_avoid_a_dead_rank_within_ten_seconds(
    tmp_path: Path, tiny_model_dir: Path, long: bool, figure: Figure
) -> None:
    deaths = 20 if long else 2
    with engine_in_thread(tiny_model_dir) as engine:
        async with (
            running_cluster(tmp_path, tiny_model_dir, engine) as cluster,
            httpx.AsyncClient(base_url=cluster.url, timeout=LIMIT, trust_env=False) as service,
        ):
            waits = [await die_and_come_back(cluster, service, k % 2) for k in range(deaths)]
    figure(f"{deaths} ranks died: an open waited {max(waits):.2f} s at most")
