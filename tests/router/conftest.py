from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TypeAlias

import pytest
import uvloop

from tests.support.proxy_fixtures import chat, engine
from tests.support.router import Lab, running_lab

__all__ = ["chat", "engine"]
StartLab: TypeAlias = Callable[..., Awaitable[Lab]]


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop that the router runs on."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def start_lab(tmp_path: Path) -> AsyncIterator[StartLab]:
    """Start a router over fake ranks; settings by dotted name."""
    async with AsyncExitStack() as stack:

        async def make(*settings: str, ranks: int = 1) -> Lab:
            return await stack.enter_async_context(running_lab(tmp_path, *settings, ranks=ranks))

        yield make


@pytest.fixture
async def lab(start_lab: StartLab) -> Lab:
    """One rank."""
    return await start_lab()


@pytest.fixture
async def pair(start_lab: StartLab) -> Lab:
    """Two ranks."""
    return await start_lab(ranks=2)
