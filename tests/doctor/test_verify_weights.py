"""Engines that somebody else started: whether they hold the run's weights, by what they say."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from any_agent.config import Config, load_config
from any_agent.demo.models.tiny import save_tiny_model
from any_agent.doctor.verdict import CheckOutcome
from any_agent.doctor.verify_weights import verify_weights
from any_agent.errors import ConfigError
from any_agent.launcher.engines import require_weights
from tests.support.errors import fails_with

pytestmark = pytest.mark.service

NOBODY = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("other") / "model", seed=1)


def settings(folder: Path, model: object, *urls: str) -> Config:
    given = [f"root={folder}", f"model.path={model}", f"server.ranks={len(urls)}"]
    return load_config(None, [*given, f"engine.urls={','.join(urls)}"], environ={})


async def test_engines_with_the_runs_weights_pass_and_with_others_fail(
    tmp_path: Path, engine: str, tiny_model_dir: Path, other_model: Path
) -> None:
    (right,) = await verify_weights(settings(tmp_path, tiny_model_dir, engine), [engine])
    assert right.outcome is CheckOutcome.PASSED, right
    mine = f"{engine}/adapters/mine"  # its base is compared
    (base,) = await verify_weights(settings(tmp_path, tiny_model_dir, mine), [mine])
    assert base.outcome is CheckOutcome.PASSED, base
    (wrong, away) = await verify_weights(settings(tmp_path, other_model, engine), [engine, NOBODY])
    assert wrong.failed
    assert "other weights" in wrong.seen
    assert away.outcome is CheckOutcome.UNCHECKED
    (hub,) = await verify_weights(settings(tmp_path, "nobody/has-this-model", engine), [engine])
    assert hub.outcome is CheckOutcome.UNCHECKED
    assert "hub" in hub.seen


def test_a_service_that_does_not_train_refuses_others(
    tmp_path: Path, engine: str, other_model: Path
) -> None:
    config = settings(tmp_path, other_model, engine, NOBODY)
    path = tmp_path / "resolved.yaml"
    path.write_text(yaml.safe_dump(config.dump()))
    said: list[str] = []
    with fails_with(ConfigError, engine):
        require_weights(config, path, said.append)
    path.write_text("no: settings")
    require_weights(config, path, said.append)
    assert any("could not be compared with the run's: " in line for line in said)
