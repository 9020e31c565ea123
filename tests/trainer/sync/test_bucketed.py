"""Weights by process group: engines that die leave it and come back, and none samples half-way."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from any_agent.errors import EngineUnavailable, TrainingError
from tests.support.engine.process import EngineProcess
from tests.support.engine.sglang_contract import call
from tests.support.engine.sync import Fleet, Weights, bring, syncing
from tests.support.engine.sync_contract import off
from tests.support.engine.updates_contract import load
from tests.support.errors import fails_with
from tests.support.other_weights import publish_other
from tests.support.real_parts import process
from trainer.sync import base
from trainer.weight_buckets import Bucket


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "RETRY_DELAY", 0.01)


@pytest.fixture(scope="module")
def processes(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with ExitStack() as stack:
        engines = [
            stack.enter_context(EngineProcess(tmp_path_factory.mktemp(f"engine-{k}")))
            for k in range(2)
        ]
        for engine in engines:
            engine.start(tiny_model_dir, "--device", "cpu")
        yield engines


async def version_of(url: str) -> str:
    _, info = await call(url, "/model_info", method="GET")
    return str(info["weight_version"])


async def sums_of(url: str) -> Any:
    _, answer = await call(url, "/weights_checker", {"action": "checksum"})
    return answer["ranks"][0]["checksums"]


@pytest.mark.service
async def test_an_engine_that_dies_leaves_and_comes_back(
    processes: list[EngineProcess], tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Killed amid a bucket, started with older weights: the other one has the new version before
    it is back, and it gets the same over a group of its own."""
    one, other = processes
    fleet = Fleet(one.url, other.url)
    weights = Weights(tiny_model_dir, tmp_path, "float32")
    killed: list[int] = []

    def kill(bucket: Bucket) -> Bucket:
        killed.append(len(bucket))
        if len(killed) == 3:
            other.kill()
        return bucket

    with syncing("distributed", dtype="float32", load_timeout=400, on_the_way=kill) as sync:
        bringing = asyncio.create_task(bring(sync, fleet, weights.version(7)))
        while fleet.proxies[0].events[-2:] != ["v7", "resume"]:
            assert not bringing.done()
            await asyncio.sleep(0.05)
        assert await version_of(one.url) == "7"
        assert not bringing.done()
        await asyncio.to_thread(other.start, tiny_model_dir, "--device", "cpu")
        await bringing
        assert await version_of(other.url) == "7"
        assert await sums_of(one.url) == await sums_of(other.url)
        # Both in one group again; a restart in between is found out, and costs one try.
        await bring(sync, fleet, weights.version(8))
        other.kill()
        await asyncio.to_thread(other.start, tiny_model_dir, "--device", "cpu")
        await bring(sync, fleet, weights.version(9))
        assert [await version_of(engine.url) for engine in processes] == ["9", "9"]
    for proxy in fleet.proxies:
        assert proxy.events[-1] == "resume"
        told = [event for event in proxy.events if event.startswith("v")]
        assert told == ["v7", "v8", "v9"]


@pytest.mark.parametrize("way", ["distributed", "tensor"])
@pytest.mark.service
async def test_engines_that_refuse_weights_keep_theirs_and_resume(
    way: str, processes: list[EngineProcess], tiny_model_dir: Path, tmp_path: Path
) -> None:
    fleet = Fleet(*(engine.url for engine in processes))
    weights = Weights(tiny_model_dir, tmp_path, "float32")
    before = [await sums_of(engine.url) for engine in processes]
    versions = [await version_of(engine.url) for engine in processes]
    with (
        syncing(way, dtype="float32", on_the_way=lambda bucket: bucket[1:]) as sync,
        fails_with(TrainingError, "lacks"),
    ):
        await bring(sync, fleet, weights.version(31))
    assert [await sums_of(engine.url) for engine in processes] == before
    assert [await version_of(engine.url) for engine in processes] == versions
    for proxy in fleet.proxies:
        assert proxy.events == ["pause", "resume"] * 3


@pytest.mark.service
async def test_an_engine_that_never_comes_back_fails_only_its_own_update(
    processes: list[EngineProcess],
    tiny_model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(base, "UNREACHABLE_TIMEOUT", -29.0)
    fleet = Fleet(processes[0].url, "http://127.0.0.1:1")
    weights = Weights(tiny_model_dir, tmp_path, "float32")
    with (
        syncing("distributed", dtype="float32", load_timeout=30) as sync,
        fails_with(EngineUnavailable, "ranks 1", "version 41"),
    ):
        await bring(sync, fleet, weights.version(41))
    assert fleet.proxies[0].events == ["pause", "v41", "resume"]
    assert fleet.proxies[1].events == []


@pytest.mark.service
async def test_engines_keep_whole_weights_when_the_trainer_dies_amid_a_bucket(
    processes: list[EngineProcess], tiny_model_dir: Path, tmp_path: Path
) -> None:
    """The engines go on with the weights that they had, whole; the next trainer's reach them."""
    other = publish_other(tiny_model_dir, tmp_path / "other", 1)
    urls = [engine.url for engine in processes]
    for url in urls:
        await load(url, tiny_model_dir, 50)
    log = tmp_path / "trainer.log"
    told = [str(other), str(tmp_path), "51", *urls]
    with process(log, "tests.support.engine.dying_sync", *told) as trainer:
        code = await asyncio.to_thread(trainer.wait, 500)
    assert code == -signal.SIGKILL, log.read_text()
    for url in urls:
        # As its proxy does after a while.
        await call(url, "/continue_generation", {})
        assert await version_of(url) == "50"
        assert await off(url, tiny_model_dir) < 1e-3 < await off(url, other)
    with syncing("distributed", dtype="float32") as sync:
        await bring(sync, Fleet(*urls), Weights(other, tmp_path, "float32").version(52))
    for url in urls:
        assert await version_of(url) == "52"
        assert await off(url, other) < 1e-3
