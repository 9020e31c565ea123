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


@pytest.fixture(params=[False, True], ids=["whole", "stream"])
def stream(request: pytest.FixtureRequest) -> bool:
    """True for a streamed answer: a test that asks for it runs both ways."""
    return bool(request.param)


@pytest.fixture(params=[False, True], ids=["cumulative", "incremental"])
def incremental(request: pytest.FixtureRequest) -> bool:
    """True for events of a stream that have the new tokens alone."""
    return bool(request.param)
