"""The embedded engine keeps SGLang's contract where weights change, as a real SGLang does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from any_agent.engine.embedded.engine import EmbeddedEngine, EngineOptions
from tests.support.engine.embedded import Serve
from tests.support.engine.updates_contract import UpdatesContract


@pytest.fixture
def models(tiny_model_dir: Path, other_model_dir: Path) -> list[Path]:
    return [tiny_model_dir, other_model_dir]


@pytest.fixture
async def url(tiny_model_dir: Path, serve: Serve) -> AsyncIterator[str]:
    options = EngineOptions(max_running_requests=4)
    async with EmbeddedEngine.load(str(tiny_model_dir), options=options) as engine:
        yield await serve(engine)


class TestUpdates(UpdatesContract):
    pass


def test_it_listens_in_private_only() -> None:
    """Before it loads anything: whoever reaches an engine may change its weights."""
    command = [sys.executable, "-m", "any_agent.engine.embedded", "--model-path", "/none"]
    done = subprocess.run(
        [*command, "--host", "0.0.0.0"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert "0.0.0.0" in done.stderr
