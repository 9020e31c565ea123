from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TypeAlias

import pytest

from any_agent.chat import ChatFormat, load_chat_format
from any_agent.engine.embedded.engine import EmbeddedEngine
from any_agent.engine.embedded.server import EngineServer, listen
from any_agent.workflow import context
from tests.support.proxy import Proxy, config_for, running_proxy
from tests.support.scripted_engine import ScriptedEngine

Serve: TypeAlias = Callable[..., Awaitable[Proxy]]
ADMIN = "operator-secret"


@pytest.fixture(scope="session")
def chat(tiny_model_dir: Path) -> ChatFormat:
    return load_chat_format(str(tiny_model_dir), enable_thinking=False)


@pytest.fixture
async def embedded(tiny_model_dir: Path) -> AsyncIterator[EmbeddedEngine]:
    async with EmbeddedEngine.load(str(tiny_model_dir)) as engine:
        yield engine


@pytest.fixture
async def serve(tmp_path: Path, chat: ChatFormat) -> AsyncIterator[Serve]:
    """Start a proxy on an engine's URL; the clients that workflows share are closed at the end."""
    async with AsyncExitStack() as stack:
        stack.push_async_callback(context.close_clients)

        async def start(engine_url: str, *settings: str) -> Proxy:
            config = config_for(tmp_path, f"server.admin_key={ADMIN}", *settings)
            return await stack.enter_async_context(
                running_proxy(config, chat, engine_url=engine_url)
            )

        yield start


@pytest.fixture
async def scripted(chat: ChatFormat) -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine(decode=chat.decode)
    async with engine.serve():
        yield engine


@pytest.fixture
async def proxy(serve: Serve, scripted: ScriptedEngine) -> Proxy:
    """On an engine that says what it is told to; no trainer has admitted anything."""
    return await serve(scripted.url)


@pytest.fixture
async def engine_url(embedded: EmbeddedEngine) -> AsyncIterator[str]:
    """Of the embedded engine with a random tiny model."""
    runner, port = await listen(EngineServer(embedded, incremental=True), "127.0.0.1", 0)
    yield f"http://127.0.0.1:{port}"
    await runner.cleanup()


@pytest.fixture
async def real_proxy(serve: Serve, engine_url: str) -> Proxy:
    return await serve(engine_url)
