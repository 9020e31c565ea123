"""An adapter reaches its place in a shared engine alone, and nothing else is told of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from any_agent.demo.models.tiny import save_tiny_model
from any_agent.engine.embedded.engine import EmbeddedEngine, EngineOptions
from any_agent.engine.embedded.server import EngineServer, listen
from any_agent.errors import ConfigError, EngineUnavailable
from any_agent.runtime.event_loop import LoopThread
from tests.support.engine.sglang_contract import call
from tests.support.engine.sync import Fleet, bring
from tests.support.errors import fails_with
from tests.support.trainer.adapters import CONFIG, stirred
from trainer.policy import Policy
from trainer.sync import NewWeights, base
from trainer.sync.adapter import AdapterSync
from trainer.weight_folders import publish_adapter


class Run:
    """A run that trains an adapter of `alice` in an engine."""

    def __init__(self, model: Path, folder: Path, url: str, name: str = "alice") -> None:
        self.policy = Policy.load(model, CONFIG)
        self.fleet = Fleet(f"{url}/adapters/{name}")
        assert self.policy.base is not None
        self._thread = LoopThread(name)
        self._thread.start()
        self.sync = AdapterSync(self._thread.call, load_timeout=20.0, base=self.policy.base)
        self._folder = folder / name
        self._folder.mkdir()

    async def publish(self, version: int) -> None:
        stirred(self.policy, seed=version)
        folder = self._folder / f"v{version:08d}"

        def write() -> None:
            if not folder.is_dir():
                publish_adapter(self.policy, self._folder, version)

        await bring(self.sync, self.fleet, NewWeights(version, 1, folder, write, lambda: iter(())))

    @property
    def events(self) -> list[str]:
        return self.fleet.proxies[0].events

    def close(self) -> None:
        self.sync.close()
        self._thread.stop()


@pytest.fixture(params=["float32", "bfloat16"])
async def engine(
    tiny_model_dir: Path, request: pytest.FixtureRequest
) -> AsyncIterator[EmbeddedEngine]:
    options = EngineOptions(live_adapters=1, dtype=request.param)
    async with EmbeddedEngine.load(str(tiny_model_dir), options) as engine:
        yield engine


@pytest.fixture
async def url(engine: EmbeddedEngine) -> AsyncIterator[str]:
    runner, port = await listen(EngineServer(engine), "127.0.0.1", 0)
    yield f"http://127.0.0.1:{port}"
    await runner.cleanup()


@pytest.fixture
async def run(tiny_model_dir: Path, tmp_path: Path, url: str) -> AsyncIterator[Any]:
    async with AsyncExitStack() as stack:

        def start(name: str, model: Path = tiny_model_dir) -> Run:
            made = Run(model, tmp_path, url, name)
            stack.callback(made.close)
            return made

        yield start


async def version_of(url: str) -> str:
    return str((await call(url, "/get_weight_version", method="GET"))[1]["weight_version"])


async def test_a_run_publishes_its_adapter_and_only_once_the_engine_has_it(
    run: Any, url: str, engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice = run("alice")
    for version in (1, 2):
        await alice.publish(version)
        assert await version_of(f"{url}/adapters/alice") == str(version)
    assert alice.events == ["pause", "v1", "resume", "pause", "v2", "resume"]
    assert await version_of(url) == "0"

    beside = engine.beside
    assert beside is not None
    put = beside.put

    def wrongly(key: str, matrices: Any) -> None:
        first = next(iter(matrices))
        a, b = matrices[first]
        put(key, matrices | {first: (1.01 * a, b)})

    monkeypatch.setattr(beside, "put", wrongly)
    monkeypatch.setattr(base, "UNREACHABLE_TIMEOUT", -20.0)
    with fails_with(EngineUnavailable, "other values"):
        await alice.publish(3)
    assert await version_of(f"{url}/adapters/alice") == "loading-3", "nothing is sampled with it"
    assert "v3" not in alice.events


async def test_an_engine_of_another_base_and_a_full_one_are_refused_by_name(
    run: Any, url: str, tmp_path: Path
) -> None:
    other = await asyncio.to_thread(save_tiny_model, tmp_path / "other", seed=1)
    stranger = run("stranger", other)
    with fails_with(ConfigError, "another model", str(other), "--model-path"):
        await stranger.publish(1)
    assert await version_of(f"{url}/adapters/stranger") == "unloaded"
    await run("alice").publish(1)
    with fails_with(ConfigError, "(alice)", "DELETE /adapters/NAME"):
        await run("bob").publish(1)
    assert await version_of(f"{url}/adapters/alice") == "1"
