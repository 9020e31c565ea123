from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from any_agent.chat import ChatFormat, load_chat_format
from tests.support.proxy import Proxy, config_for, running_proxy
from tests.support.scripted_engine import ScriptedEngine

Start: TypeAlias = Callable[..., Awaitable[Proxy]]
Restart: TypeAlias = Callable[..., Awaitable[Proxy]]


@pytest.fixture(scope="session")
def chat(tiny_model_dir: Path) -> ChatFormat:
    return load_chat_format(str(tiny_model_dir), enable_thinking=False)


@pytest.fixture
async def engine(chat: ChatFormat) -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine(decode=chat.decode)
    async with engine.serve():
        yield engine


@pytest.fixture
async def start(tmp_path: Path, chat: ChatFormat, engine: ScriptedEngine) -> AsyncIterator[Start]:
    """Start a proxy on the scripted engine (or on ``engine_url``); settings by dotted name."""
    async with AsyncExitStack() as stack:

        async def make(
            *settings: str, engine_url: str = "", admit: int | None = None, **options: Any
        ) -> Proxy:
            config = config_for(tmp_path, *settings)
            context = running_proxy(config, chat, engine_url=engine_url or engine.url, **options)
            proxy = await stack.enter_async_context(context)
            if admit is not None:
                await proxy.admit(admit)
            return proxy

        yield make


@pytest.fixture
async def proxy(start: Start) -> Proxy:
    """A proxy with room for many train sessions."""
    proxy = await start()
    await proxy.admit(1000)
    return proxy


@pytest.fixture
async def restart(
    tmp_path: Path, chat: ChatFormat, engine: ScriptedEngine
) -> AsyncIterator[Restart]:
    """End the proxy that runs, if one does, and start the next one on its journal."""
    async with AsyncExitStack() as stack:

        async def again(*settings: str, admit: int | None = 5, **options: Any) -> Proxy:
            await stack.aclose()
            config = config_for(tmp_path, *settings)
            context = running_proxy(config, chat, engine_url=engine.url, **options)
            proxy = await stack.enter_async_context(context)
            if admit is not None:
                await proxy.admit(admit)
            return proxy

        yield again
