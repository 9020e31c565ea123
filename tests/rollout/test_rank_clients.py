"""Ranks are found by their registry entries, also after they moved."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from any_agent.errors import NotFound
from any_agent.rollout import RankClients
from any_agent.rollout import rank_clients as module
from any_agent.rundir.fleet import Fleet, FleetFile, save_fleet
from any_agent.rundir.registry import RegistryEntry, publish, rank_name
from tests.support.errors import fails_with

INFO = {
    **{"experiment": "e", "trial": "t", "user": "u", "model": "m"},
    **{"state": "training", "step": 0, "checkpoint": None},
}


@asynccontextmanager
async def rank(number: int) -> AsyncIterator[str]:
    """The URL of one that answers `/rl/v1/run`, with its number as the version."""

    async def run(request: web.Request) -> web.Response:
        return web.json_response(INFO | {"version": number})

    app = web.Application()
    app.router.add_get("/rl/v1/run", run)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


def tell(folder: Path, rank: int, url: str) -> None:
    entry = RegistryEntry(
        name=rank_name(rank), boot_id="b", url=url, pid=os.getpid(), engine_url="e"
    )
    publish(folder, entry)


async def versions(ranks: RankClients) -> list[int]:
    infos = await ranks.all(lambda rank: ranks.clients[rank].run_info())
    return [info.version for info in infos]


async def test_a_rank_is_waited_for_and_followed(tmp_path: Path) -> None:
    ranks = RankClients(tmp_path, FleetFile(None, 2), retry_for=15)
    async with rank(10) as zero, rank(12) as moved:
        tell(tmp_path, 0, zero)
        waiting = asyncio.create_task(versions(ranks))
        await ranks.clients[0].run_info()
        assert not waiting.done()
        async with rank(11) as one:
            tell(tmp_path, 1, one)
            assert await waiting == [10, 11]
        # Another process, another address: the next attempt goes there.
        asking = asyncio.create_task(versions(ranks))
        tell(tmp_path, 1, moved)
        assert await asking == [10, 12]
        entry = ranks.entry(1)
        assert entry is not None
        assert (entry.url, entry.engine_url) == (moved, "e")
    await ranks.close()


async def test_calls_to_all_ranks_end_before_the_first_error_is_raised() -> None:
    ranks = RankClients(Path("nowhere"), FleetFile(None, 3))
    ended: list[int] = []

    async def call(rank: int) -> int:
        if rank == 0:
            raise ValueError("first")
        await asyncio.sleep(0)
        ended.append(rank)
        return rank

    with fails_with(ValueError, "first"):
        await ranks.all(call)
    assert ended == [1, 2]
    await ranks.close()


def test_a_session_names_its_rank(tmp_path: Path) -> None:
    ranks = RankClients(tmp_path, FleetFile(None, 2))
    assert [ranks.home(f"ses-{rank}-{'0' * 16}") for rank in (0, 1)] == [0, 1]
    for wrong in (f"ses-2-{'0' * 16}", "ses-0-x", ""):
        with pytest.raises(NotFound):
            ranks.home(wrong)


async def test_clients_follow_the_fleet_as_ranks_come_and_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "POLL_INTERVAL", 0.0)
    path = tmp_path / "fleet.json"
    registry = tmp_path / "registry"
    registry.mkdir()
    ranks = RankClients(registry, FleetFile(path, 2), retry_for=0.2)

    def change(fleet: Fleet) -> None:
        save_fleet(path, fleet)
        ranks.follow()

    joining = Fleet.of(2).with_state(2, "joining")
    change(joining)
    assert (ranks.present, ranks.joining) == ([0, 1], []), "its proxy is not up"
    async with rank(10) as zero, rank(11) as one, rank(12) as two:
        for number, url in enumerate((zero, one, two)):
            tell(registry, number, url)
        ranks.follow()
        assert (ranks.present, ranks.joining) == ([0, 1, 2], [2])
        assert await versions(ranks) == [10, 11, 12]
        change(joining.with_state(2, "serving").with_state(0, "drained"))
        assert (ranks.present, ranks.sampling, ranks.joining) == ([0, 1, 2], [1, 2], [])
        assert await versions(ranks) == [10, 11, 12], "a resume may need its sessions"
        change(ranks.fleet.with_state(0, None))
        assert (ranks.present, len(ranks)) == ([1, 2], 2)
        assert await versions(ranks) == [11, 12]
        with fails_with(NotFound, code=module.RANK_ENDED):
            await ranks.clients[0].run_info()
        infos = await ranks.all(lambda rank: ranks.clients[rank].run_info(), [0, 1])
        assert [info.version for info in infos] == [11], "it has left meanwhile"
        assert ranks.home(f"ses-0-{'0' * 16}") == 0
    await ranks.close()
