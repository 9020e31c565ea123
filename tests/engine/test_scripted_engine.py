"""The fake that other tests lean on keeps SGLang's contract itself."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.engine.embedded.sglang_contract import SGLangContract
from tests.fakes.scripted_engine import ScriptedEngine


class TestCumulative(SGLangContract):
    @pytest.fixture
    async def url(self) -> AsyncIterator[str]:
        async with ScriptedEngine(pace=0.0005).serve() as url:
            yield url


class TestIncremental(SGLangContract):
    @pytest.fixture
    async def url(self) -> AsyncIterator[str]:
        async with ScriptedEngine(pace=0.0005, incremental=True).serve() as url:
            yield url
