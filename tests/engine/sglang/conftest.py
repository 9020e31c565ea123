"""Real SGLangs, which take half a minute to start: one pair for all tests that can share it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.sglang.real_sglang import sglangs


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of one shape, with different weights."""
    from any_agent.demo.models.tiny import save_tiny_model

    folder = tmp_path_factory.mktemp("models")
    return [save_tiny_model(folder / str(seed), seed=seed) for seed in range(2)]


@pytest.fixture(scope="session")
def servers(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Their URLs; they were started with the first model."""
    with sglangs(models[0], tmp_path_factory.mktemp("sglang"), 2) as urls:
        yield urls
