from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.trainer.loop import RUN, Lab, config_of, episodes, outcome, settings_of


@pytest.fixture
def settings(tiny_model_dir: Path, tmp_path: Path) -> list[str]:
    return settings_of(tmp_path, tiny_model_dir)


@pytest.fixture(scope="session")
def uninterrupted(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The end of a trainer that nothing disturbs."""
    base = settings_of(tmp_path_factory.mktemp("whole"), tiny_model_dir)
    lab = Lab(config_of(base, *RUN), episodes())
    assert lab.trainer.train()
    return outcome(lab)
