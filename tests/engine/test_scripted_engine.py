"""The fake that other tests lean on keeps SGLang's contract itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from any_agent.engine.model_fingerprint import shape_of
from tests.support.engine.sglang_contract import SGLangContract
from tests.support.scripted_engine import VOCABULARY, ScriptedEngine


class TestContract(SGLangContract):
    @pytest.fixture(params=["cumulative", "incremental"])
    async def url(self, request: pytest.FixtureRequest) -> AsyncIterator[str]:
        incremental = request.param == "incremental"
        async with ScriptedEngine(pace=0.0005, incremental=incremental).serve() as url:
            yield url


def test_the_scripted_engine_has_the_vocabulary_of_the_tests_model(tiny_model_dir: Path) -> None:
    assert shape_of(str(tiny_model_dir)).vocab_size == VOCABULARY
