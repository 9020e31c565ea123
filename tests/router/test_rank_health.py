"""Which ranks count as serving, and how they are waited for."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from any_agent.errors import ServiceUnavailable
from any_agent.rundir import registry
from any_agent.rundir.fleet import FleetFile
from any_agent.rundir.registry import Registry, RegistryEntry, publish, rank_name
from router import rank_health as health
from router.rank_health import RankHealth
from tests.support.proxy import until


def tell(folder: Path, rank: int, **fields: Any) -> None:
    url = f"http://127.0.0.1:{9000 + rank}/"
    entry = RegistryEntry(name=rank_name(rank), boot_id="b", url=url, pid=1)
    publish(folder, entry.model_copy(update=fields))


@pytest.fixture
def ranks(tmp_path: Path) -> RankHealth:
    return RankHealth(Registry(tmp_path), FleetFile(None, 3), wait=5)


def soon(seconds: float = 15) -> float:
    return time.monotonic() + seconds


async def test_ranks_that_come_and_go_are_known(
    tmp_path: Path, ranks: RankHealth, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ranks.refresh()
    assert ranks.live == []
    for rank in (2, 0, 7):  # of which the service has no seventh
        tell(tmp_path, rank)
    await ranks.refresh()
    assert ranks.live == [0, 2]
    assert [ranks.url(k) for k in range(3)] == [
        "http://127.0.0.1:9000",
        "",
        "http://127.0.0.1:9002",
    ]
    tell(tmp_path, 0, state="stopping")
    await ranks.refresh()
    assert ranks.live == [2]
    monkeypatch.setattr(registry, "SILENT_AFTER", 0.0)
    await ranks.refresh()
    assert ranks.live == [], "who is silent is away"


async def test_a_failed_rank_is_away_until_it_writes_again(
    tmp_path: Path, ranks: RankHealth
) -> None:
    tell(tmp_path, 0)
    tell(tmp_path, 1)
    await ranks.refresh()
    # Written before the failure, though not read before it.
    tell(tmp_path, 0)
    ranks.mark_failed(0)
    assert ranks.live == [1]
    for _ in range(2):
        await ranks.refresh()
        assert ranks.live == [1]
    tell(tmp_path, 0)
    await ranks.refresh()
    assert ranks.live == [0, 1]


async def test_a_disk_that_hangs_holds_nobody_up(
    tmp_path: Path, ranks: RankHealth, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The view stands still meanwhile, and a failure counts all the same."""
    tell(tmp_path, 0)
    tell(tmp_path, 1)
    monkeypatch.setattr(health, "REFRESH", 0.01)
    threads, go = [], threading.Event()
    read = Registry.refresh

    def stuck(self: Registry) -> None:
        threads.append(threading.current_thread())
        assert go.wait(30)
        read(self)

    async with ranks.watched():
        monkeypatch.setattr(Registry, "refresh", stuck)
        await until(lambda: threads, "the registry is read")
        assert ranks.live == [0, 1]
        ranks.mark_failed(0)
        assert ranks.live == [1]
        with pytest.raises(ServiceUnavailable):
            await ranks.reach(0, soon(0.05))
        go.set()
        await until(lambda: len(threads) > 2, "the registry is read again")
        assert ranks.live == [1]
        tell(tmp_path, 0)
        await until(lambda: ranks.live == [0, 1], "the rank is back")
    assert threading.current_thread() not in threads


async def test_calls_wait_for_the_rank_they_need(tmp_path: Path, ranks: RankHealth) -> None:
    async with ranks.watched():
        one = asyncio.create_task(ranks.reach(1, soon()))
        some = asyncio.create_task(ranks.reach_any(soon()))
        await until(lambda: ranks.waiting == 2, "both wait")
        tell(tmp_path, 0)
        assert await some == [0]
        await until(lambda: ranks.waiting == 1, "the other waits on")
        tell(tmp_path, 1)
        assert await one == "http://127.0.0.1:9001"
        assert ranks.waiting == 0


async def test_the_watch_of_ranks_survives_a_fault(
    tmp_path: Path, ranks: RankHealth, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "REFRESH", 0.01)
    refresh, faults = Registry.refresh, 0

    def faulty(self: Registry) -> None:
        nonlocal faults
        if faults < 3:
            faults += 1
            raise RuntimeError("planted")
        refresh(self)

    async with ranks.watched():
        monkeypatch.setattr(Registry, "refresh", faulty)
        tell(tmp_path, 0)
        await until(lambda: ranks.live == [0], "the rank is seen")
    assert faults == 3
