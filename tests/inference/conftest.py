from __future__ import annotations

from pathlib import Path

import pytest

from any_agent.rundir.layout import RunDir
from tests.support.trials import save_trial


@pytest.fixture(autouse=True)
def no_place_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROOT", "USER"):
        monkeypatch.delenv(f"ANY_AGENT_{name}", raising=False)


@pytest.fixture(scope="session")
def models(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of one shape, with different weights."""
    from any_agent.demo.models.tiny import save_tiny_model

    folder = tmp_path_factory.mktemp("models")
    return [tiny_model_dir, save_tiny_model(folder / "1", seed=1)]


@pytest.fixture(scope="session")
def trial(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Step 10, which is version 11, and step 20, which is version 21."""
    root = tmp_path_factory.mktemp("root")
    return save_trial(root, {(10, 11): models[0], (20, 21): models[1]}, base=models[0])
