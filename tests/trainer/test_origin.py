"""Steps before the first checkpoint are repeated from what the run began with, or not at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from any_agent.demo.models.tiny import save_tiny_model
from any_agent.errors import ConfigError
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


def refused(before: Lab, settings: list[str], *more: str) -> str:
    """Why another start does not repeat its step; the step stays."""
    lab = Lab(config_of(settings, *more), [], before=before)
    with pytest.raises(ConfigError) as raised:
        lab.trainer.train()
    assert lab.trainer.policy.steps == 0 and lab.manifests == [1]
    message = raised.value.message
    assert "step-00000001.json" in message and "or choose another --trial" in message
    return message


def test_steps_are_not_repeated_with_another_adapter(settings: list[str]) -> None:
    first = die_after_a_step(settings, *ADAPTER)
    said = refused(first, settings, "train.lora.rank=8", "train.lora.alpha=12")
    assert "train.lora.rank=8: set train.lora.rank=4" in said
    said = refused(first, settings, "train.lora.rank=4", "train.lora.alpha=8")
    assert "set train.lora.alpha=12" in said
    assert "train.lora.target_modules" in refused(
        first, settings, *ADAPTER, "train.lora.target_modules=q_proj"
    )
    assert "train.lora.rank=4 and train.lora.alpha=12" in refused(first, settings)


def test_an_adapter_after_all_weights_is_refused(settings: list[str]) -> None:
    first = die_after_a_step(settings)
    assert "train.lora" in refused(first, settings, *ADAPTER)


@pytest.mark.parametrize("adapter", [(), ADAPTER], ids=["all weights", "adapter"])
def test_another_seed_or_other_weights_are_refused(
    settings: list[str], tmp_path: Path, adapter: tuple[str, ...]
) -> None:
    first = die_after_a_step(settings, *adapter)
    said = refused(first, settings, *adapter, "train.seed=5")
    assert "train.seed=5: set train.seed=0" in said
    shutil.rmtree(tmp_path / "model")
    save_tiny_model(tmp_path / "model", seed=1)
    assert "model.safetensors" in refused(first, settings, *adapter)


def test_a_manifest_of_an_earlier_version_is_repeated(settings: list[str]) -> None:
    first = die_after_a_step(settings)
    (path,) = first.trainer.dir.manifests.glob("step-*.json")
    data = json.loads(path.read_text())
    del data["origin"]
    path.write_text(json.dumps(data))
    again = Lab(config_of(settings, "train.seed=5"), [pair("b")], before=first)
    assert again.trainer.train()
    assert again.executor.replayed == [["a-good", "a-bad"]]
