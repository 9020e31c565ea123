"""Steps before the first checkpoint are repeated from what the run began with, or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from any_agent.demo.models.tiny import save_tiny_model
from any_agent.errors import ConfigError
from tests.support.errors import fails_with
from tests.support.trainer.episodes import pair
from tests.support.trainer.loop import Lab, config_of

ADAPTER = ("train.lora.rank=4", "train.lora.alpha=12")


@pytest.fixture
def settings(tiny_model_dir: Path, tmp_path: Path) -> list[str]:
    """A run whose model is its own, as it may change."""
    model = shutil.copytree(tiny_model_dir, tmp_path / "model")
    return [f"root={tmp_path / 'runs'}", f"model.path={model}", "train.lr=1e-2", "train.steps=2"]


def die_after_a_step(settings: list[str], *more: str) -> Lab:
    lab = Lab(config_of(settings, *more), [pair("a"), pair("b")])
    lab.die("published")
    assert lab.trainer.checkpoint is None
    return lab


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (ADAPTER, ("train.lora.rank=8", "train.lora.alpha=12"), "rank=8: set train.lora.rank=4"),
        (ADAPTER, ("train.lora.rank=4", "train.lora.alpha=8"), "set train.lora.alpha=12"),
        (ADAPTER, (*ADAPTER, "train.lora.target_modules=q_proj"), "train.lora.target_modules"),
        (ADAPTER, (), "train.lora.rank=4 and train.lora.alpha=12"),
        ((), ADAPTER, "train.lora"),
        ((), ("train.seed=5",), "train.seed=5: set train.seed=0"),
        (ADAPTER, (*ADAPTER, "train.seed=5"), "train.seed=5: set train.seed=0"),
        ((), ("other weights",), "model.safetensors"),
        (ADAPTER, (*ADAPTER, "other weights"), "model.safetensors"),
    ],
)
def test_steps_are_not_repeated_from_another_origin(
    settings: list[str], before: tuple[str, ...], after: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    first = die_after_a_step(settings, *before)
    if "other weights" in after:
        shutil.rmtree(tmp_path / "model")
        save_tiny_model(tmp_path / "model", seed=1)
    more = [setting for setting in after if setting != "other weights"]
    lab = Lab(config_of(settings, *more), [], before=first)
    with fails_with(ConfigError, said, "step-00000001.json", "or choose another --trial"):
        lab.trainer.train()
    assert lab.trainer.policy.steps == 0 and lab.manifests == [1], "the step stays"
