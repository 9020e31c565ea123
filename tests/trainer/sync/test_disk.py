"""Weights reach every rank; one that is away keeps none of the others, and never gets a version
that its engine does not hold."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import AsyncMock, Mock

import pytest
from aiohttp import web

from any_agent.client.aiohttp_transport import tls_context
from any_agent.client.rl_client import RLClient
from any_agent.errors import EngineUnavailable, ServiceUnavailable, TrainingError
from any_agent.rundir.checksums import sound, write_manifest
from any_agent.rundir.fleet import Fleet as Ranks
from any_agent.rundir.registry import RegistryEntry
from tests.support.errors import fails_with
from tests.support.fixed_ranks import FixedRanks
from tests.support.ports import own_port
from tests.support.waiting import until
from trainer.sync import NewWeights, base, disk
from trainer.sync.bucketed import BucketSync, UpdateAttempt
from trainer.sync.disk import DiskSync
from trainer.sync.transports import TensorTransport

T = TypeVar("T")


class Engine:
    """Takes weights as its ``answers`` say (the last one stays), or is away."""

    def __init__(self) -> None:
        self.port = own_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.answers: list[int] = [200]
        self.says = "m"
        self.loaded: list[dict[str, Any]] = []
        self.flushes = 0
        self.names: list[str] = []

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        async def load(request: web.Request) -> web.Response:
            status = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            if status == 0:
                await asyncio.Event().wait()
            if status == 200:
                self.loaded.append(await request.json())
            told = {"success": status == 200, "message": self.says}
            return web.json_response(told, status=status)

        async def flush(request: web.Request) -> web.Response:
            assert float(request.query["timeout"]) > 0
            self.flushes += 1
            return web.Response()

        async def rename(request: web.Request) -> web.Response:
            self.names.append((await request.json())["new_version"])
            return web.json_response({"success": True})

        app = web.Application()
        app.router.add_post("/update_weights_from_disk", load)
        app.router.add_post("/flush_cache", flush)
        app.router.add_post("/update_weight_version", rename)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        try:
            yield
        finally:
            await runner.cleanup()

    @property
    def version(self) -> int:
        return int(self.loaded[-1]["weight_version"]) if self.loaded else 0


class Proxy(RLClient):
    """Notes what it is told; asserts that its engine holds what is published."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.events: list[str] = []
        self.fails: list[Exception] = []

    async def pause(self, *, ttl: float) -> None:
        if self.fails:
            raise self.fails.pop(0)
        self.events.append("pause")

    async def publish_version(self, *, version: int, path: str, step: int) -> None:
        assert self.engine.version == version
        self.events.append(f"v{version}")

    async def resume(self) -> None:
        self.events.append("resume")

    async def run_info(self) -> Any:
        return SimpleNamespace(version=self.engine.version)


class Fleet(FixedRanks):
    def __init__(self, *engines: Engine) -> None:
        self.engines = engines
        super().__init__(*map(Proxy, engines))

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        zero, one = self.engines
        async with zero.serve(), one.serve():
            yield

    @property
    def events(self) -> list[list[str]]:
        return [client.events for client in self.clients.values()]

    def entry(self, rank: int) -> RegistryEntry | None:
        engine = self.clients[rank].engine
        return RegistryEntry(
            name=f"rank-{rank}", boot_id="b", url="u", pid=os.getpid(), engine_url=engine.url
        )


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "RETRY_DELAY", 0.01)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet(Engine(), Engine())


def on_this_loop(coroutine: Coroutine[Any, Any, T], timeout: float) -> T:
    """From a thread, as the trainer's is."""
    return asyncio.run_coroutine_threadsafe(coroutine, HERE.get()).result(timeout)


HERE: ContextVar[asyncio.AbstractEventLoop] = ContextVar("HERE")
SEVEN = NewWeights(7, 3, Path("/weights/v7"), write=lambda: None, buckets=lambda: iter(()))


def update(
    fleet: Fleet, *, load_timeout: float = 30.0, new: NewWeights = SEVEN, how: str = "update"
) -> asyncio.Task[None]:
    HERE.set(asyncio.get_running_loop())
    sync = DiskSync(on_this_loop, load_timeout=load_timeout)
    return asyncio.create_task(asyncio.to_thread(getattr(sync, how), fleet, new))


WHOLE = ["pause", "v7", "resume"]


TRIED = ["pause", "resume"]


@pytest.mark.parametrize(
    ("answers", "fails", "events"),
    [
        ([200], 0, WHOLE),
        # A proxy that restarts in between is told again; an engine may fail for a moment.
        ([200], 2, WHOLE),
        ([503, 500, 200], 0, [*TRIED, *TRIED, *WHOLE]),
        # One that refuses them is not asked again.
        ([400], 0, TRIED),
    ],
)
async def test_weights_reach_every_rank_that_does_not_refuse(
    fleet: Fleet,
    answers: list[int],
    fails: int,
    events: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Their folder, which is not there, is as it was written.
    monkeypatch.setattr(disk, "damage", lambda _: None)
    fleet.engines[1].answers = list(answers)
    fleet.clients[1].fails = [ServiceUnavailable("away") for _ in range(fails)]
    refused = fails_with(TrainingError, "version 7") if answers == [400] else nullcontext()
    async with fleet.serving():
        with refused:
            await update(fleet)
    assert fleet.events == [WHOLE, events]
    told = {"model_path": "/weights/v7", "weight_version": "7", "flush_cache": True}
    assert fleet.engines[0].loaded == [told]


async def test_all_weight_updates_share_one_tls_context(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is a megabyte outside Python's heap, and freed only when a cycle of objects is found."""
    tls_context()
    refused = Mock(side_effect=AssertionError("a further context"))
    monkeypatch.setattr(ssl, "create_default_context", refused)
    async with fleet.serving():
        await update(fleet)
        sync = BucketSync(on_this_loop, TensorTransport(), load_timeout=30, dtype="float32")
        await asyncio.to_thread(UpdateAttempt(sync, fleet, SEVEN, alone=False).run, [])
    assert fleet.events == [WHOLE, WHOLE]


async def test_a_rank_that_is_away_delays_no_other_rank(fleet: Fleet) -> None:
    zero, one = fleet.engines
    here, away = fleet.clients.values()
    async with zero.serve():
        running = update(fleet)
        await until(lambda: here.events == WHOLE)
        await until(lambda: away.events.count("resume") > 1)
        assert not running.done()
        async with one.serve():
            await running
    assert here.events == WHOLE
    # Never was it left paused, nor told of weights that its engine did not hold.
    attempts = away.events[:-3]
    assert attempts == ["pause", "resume"] * (len(attempts) // 2)
    assert away.events[-3:] == WHOLE


@pytest.mark.parametrize("answer", [503, 0], ids=["fails", "silent"])
async def test_a_rank_that_never_takes_its_weights_ends_the_update(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, answer: int
) -> None:
    monkeypatch.setattr(base, "UNREACHABLE_TIMEOUT", -0.5)
    fleet.engines[0].answers = [answer]
    async with fleet.serving():
        with fails_with(EngineUnavailable, "rank 0", "version 7"):
            await update(fleet, load_timeout=3)
    failed, other = fleet.events
    assert failed[-1] == "resume" and "v7" not in failed and other == WHOLE


@pytest.mark.parametrize("answers", [[400, 200], [400, 400, 200]], ids=["once", "twice"])
async def test_an_engine_that_loaded_but_did_not_flush_is_flushed_and_named(
    fleet: Fleet, answers: list[int]
) -> None:
    """SGLang then has the weights, but neither forgets what is cached nor tells the version."""
    one, other = fleet.engines
    one.answers = list(answers)
    one.says = "Weights were updated, but the cache was not flushed because requests are"
    async with fleet.serving():
        await update(fleet)
    # Before it goes on, where that helps.
    assert fleet.events[0] == ["pause", "resume"] * (len(answers) - 2) + WHOLE
    assert (one.flushes, other.flushes) == (1, 0)
    # The old version's name is not for the new weights, not even for a moment.
    assert (one.names, other.names) == (["loading-7"], [])


async def test_a_rank_that_joins_or_is_drained_is_not_waited_for(fleet: Fleet) -> None:
    async with fleet.engines[0].serve():
        fleet.change(Ranks.of(2).with_state(1, "joining"))
        await update(fleet)
        assert fleet.events[1] == []
        fleet.change(Ranks.of(2))
        updating = update(fleet)
        await until(lambda: fleet.events[1].count("resume") > 1)
        fleet.change(Ranks.of(2).with_state(1, "draining").with_state(1, "drained"))
        await updating
        seen = list(fleet.events[1])
        await update(fleet)
    assert fleet.events == [WHOLE * 3, seen]


@pytest.mark.parametrize("answers", [True, False], ids=["has it", "does not answer"])
async def test_a_repair_updates_only_the_ranks_without_the_version(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """One that does not answer keeps no other from its weights."""
    if answers:
        fleet.engines[0].loaded = [{"weight_version": "7"}]
    else:
        away = AsyncMock(side_effect=ServiceUnavailable("rank 0 does not answer"))
        monkeypatch.setattr(fleet.clients[0], "run_info", away)
    async with fleet.serving():
        with nullcontext() if answers else pytest.raises(ServiceUnavailable):
            await update(fleet, how="repair")
    assert fleet.events == [[], WHOLE]


async def test_a_folder_that_engines_find_damaged_is_written_anew(
    fleet: Fleet, tmp_path: Path
) -> None:
    folder = tmp_path / "v7"
    written: list[int] = []

    def write() -> None:
        if not sound(folder):
            written.append(1)
            folder.mkdir()
            (folder / "model.safetensors").write_bytes(b"weights")
            write_manifest(folder)

    write()
    (folder / "model.safetensors").write_bytes(b"strange")
    engine = fleet.engines[0]
    engine.answers, engine.says = [400, 200], "the weights are damaged"
    new = NewWeights(7, 3, folder, write=write, buckets=lambda: iter(()))
    async with fleet.serving():
        await update(fleet, new=new)
    assert len(written) == 2 and (tmp_path / "damaged-v7").is_dir()
    assert fleet.events[0] == ["pause", "resume", *WHOLE]
    # A refusal of whole weights is no reason to write them again.
    engine.answers = [400]
    async with fleet.serving():
        with fails_with(TrainingError, "version 7"):
            await update(fleet, new=new)
    assert len(written) == 2
