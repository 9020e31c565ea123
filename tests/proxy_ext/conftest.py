from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.archives import Rank
from tests.support.proxy_fixtures import chat, engine, proxy, restart, start
from tests.support.redis_fixtures import server, shared_server

__all__ = ["chat", "engine", "proxy", "restart", "server", "shared_server", "start"]


@pytest.fixture
async def rank(tmp_path: Path) -> AsyncIterator[Rank]:
    rank = await Rank(tmp_path / "u" / "e" / "t").start()
    yield rank
    await rank.stop()
