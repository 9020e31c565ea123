from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from any_agent.engine import SGLangEngine
from tests.support.engine.sglang import client_of
from tests.support.scripted_engine import ScriptedEngine


@pytest.fixture
async def scripted() -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine(incremental=True)
    async with engine.serve():
        yield engine


@pytest.fixture
async def client(scripted: ScriptedEngine) -> AsyncIterator[SGLangEngine]:
    async with client_of(scripted) as client:
        yield client
