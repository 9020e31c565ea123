"""Weights that our trainer sends into two real SGLangs, each way, judged by log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from any_agent.ports import reserve
from tests.engine.embedded.sync_contract import SyncContract
from tests.engine.embedded.updates_contract import load
from tests.engine.sglang.real_sglang import sglang


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of one shape, with different weights."""
    from any_agent.demo.model import save_tiny_model

    folder = tmp_path_factory.mktemp("models")
    return [save_tiny_model(folder / str(seed), seed=seed) for seed in range(2)]


@pytest.fixture(scope="session")
def servers(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    with ExitStack() as stack:
        urls = []
        for _ in range(2):
            with reserve("127.0.0.1", 0) as listener:
                port = listener.getsockname()[1]
            folder = tmp_path_factory.mktemp("sglang")
            urls.append(stack.enter_context(sglang(models[0], port, folder)))
        yield urls


@pytest.fixture
async def engines(servers: list[str], models: list[Path]) -> list[str]:
    for url in servers:
        await load(url, models[0], 0)
    return servers


class TestSync(SyncContract):
    dtype = "bfloat16"
    rounding = 0.1
    """SGLang computes in bfloat16 here."""
