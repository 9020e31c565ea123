from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.proxy_fixtures import chat, engine, start
from tests.support.sdk.hops import Server, serving
from tests.support.sdk_fixtures import serve, served

__all__ = ["chat", "engine", "serve", "served", "start"]


@pytest.fixture
async def service() -> AsyncIterator[Server]:
    async with serving() as server:
        yield server


@pytest.fixture
async def elsewhere() -> AsyncIterator[Server]:
    async with serving() as server:
        yield server
