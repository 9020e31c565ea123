from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.engine.embedded import Serve

if TYPE_CHECKING:
    from any_agent.engine.embedded.engine import EmbeddedEngine
    from any_agent.engine.embedded.model_loader import LoadedModel


@pytest.fixture(scope="session")
def loaded(tiny_model_dir: Path) -> LoadedModel:
    """The tiny model, shared: tests must not change its weights."""
    from any_agent.engine.embedded.model_loader import load_model

    return load_model(str(tiny_model_dir))


@pytest.fixture(scope="session")
def other_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shape, other weights."""
    from any_agent.demo.models.tiny import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("other") / "model", seed=1)


@pytest.fixture
async def engine(loaded: LoadedModel) -> AsyncIterator[EmbeddedEngine]:
    from any_agent.engine.embedded.engine import EmbeddedEngine, EngineOptions

    async with EmbeddedEngine(loaded, EngineOptions(max_running_requests=4)) as engine:
        yield engine


@pytest.fixture
async def own_engine(tiny_model_dir: Path) -> AsyncIterator[EmbeddedEngine]:
    """An engine whose weights the test may change."""
    from any_agent.engine.embedded.engine import EmbeddedEngine

    async with EmbeddedEngine.load(str(tiny_model_dir)) as engine:
        yield engine


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Serve an engine over HTTP; gives its URL."""
    from any_agent.engine.embedded.server import EngineServer, listen

    async with AsyncExitStack() as stack:

        async def start(engine: EmbeddedEngine, **options: Any) -> str:
            runner, port = await listen(EngineServer(engine, **options), "127.0.0.1", 0)
            stack.push_async_callback(runner.cleanup)
            return f"http://127.0.0.1:{port}"

        yield start
