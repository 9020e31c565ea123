"""Checkpoints of an adapter: complete, exact to resume, refused where they do not fit."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from any_agent.config import Config
from any_agent.demo.models.tiny import save_tiny_model
from any_agent.errors import ConfigError
from any_agent.rundir.layout import published_versions, weights_folder
from tests.support.errors import fails_with
from tests.support.trainer.adapters import CONFIG, LORA, row_logprobs, stirred, train
from tests.support.trainer.episodes import pair
from tests.support.trainer.loop import Lab, assert_same_outcome, config_of, outcome
from tests.support.trainer.policies import random_rows
from trainer.checkpoint import load_checkpoint, save_checkpoint
from trainer.lora import Lora
from trainer.model import PolicyConfig
from trainer.policy import Policy
from trainer.weight_folders import holds_weights


def test_going_on_equals_never_having_stopped_bit_for_bit(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    policy = Policy.load(tiny_model_dir, CONFIG)
    train(policy, range(3))
    path = save_checkpoint(tmp_path, policy, tiny_model_dir, {"version": 3})
    train(policy, range(3, 5))
    again, state = load_checkpoint(path, CONFIG)
    assert state == {"version": 3} and again.steps == 3
    train(again, range(3, 5))
    mine, other = (dict(p.model.named_parameters()) for p in (policy, again))
    for name, tensor in mine.items():
        assert torch.equal(tensor, other[name]), name
        for key, moment in policy.optimizer.state.get(tensor, {}).items():
            assert torch.equal(moment, again.optimizer.state[other[name]][key]), (name, key)


@pytest.fixture(scope="module")
def saved(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    policy = stirred(Policy.load(tiny_model_dir, CONFIG))
    train(policy, range(1))
    return save_checkpoint(tmp_path_factory.mktemp("run"), policy, tiny_model_dir, {"version": 1})


def a_checkpoint_is_complete(base: Path, folder: Path) -> None:
    """Model and adapter in it compute what the policy computes."""
    policy = stirred(Policy.load(base, CONFIG))
    path = save_checkpoint(folder, policy, base, {})
    rows = random_rows(8, dtype=torch.float32)
    expected = torch.cat(row_logprobs(policy, rows))
    bare = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    by_peft = PeftModel.from_pretrained(bare, path / "adapter").merge_and_unload()
    by_peft.requires_grad_(True)
    for model in (AutoModelForCausalLM.from_pretrained(path, dtype="auto"), by_peft):
        found = torch.cat(row_logprobs(Policy(model, PolicyConfig(threads=1)), rows))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_a_checkpoint_has_the_merged_model_and_the_adapter(
    saved: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    a_checkpoint_is_complete(tiny_model_dir, tmp_path)
    config = json.loads((saved / "adapter" / "adapter_config.json").read_text())
    wanted = {"r": 4, "lora_alpha": 12, "lora_dropout": 0.0, "peft_type": "LORA"}
    wanted["base_model_name_or_path"] = str(tiny_model_dir)
    assert {name: config[name] for name in wanted} == wanted
    assert config["target_modules"][:2] == ["down_proj", "gate_proj"]
    sizes = json.loads((saved / "manifest.json").read_text())["files"]
    optimizer = sizes["trainer/optimizer.safetensors"]
    assert 1 < optimizer / sizes["adapter/adapter_model.safetensors"] < 3
    assert optimizer < sizes["model.safetensors"]


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        (None, "train.lora.rank=4 and train.lora.alpha=12"),
        (replace(LORA, rank=8), "train.lora.rank=8: set train.lora.rank=4"),
        (replace(LORA, alpha=8), "alpha 12, and train.lora.alpha=8"),
        (replace(LORA, targets=("q_proj",)), "train.lora.target_modules"),
    ],
)
def test_a_checkpoint_is_not_resumed_with_another_adapter(
    saved: Path, lora: Lora | None, said: str
) -> None:
    with fails_with(ConfigError, said):
        load_checkpoint(saved, replace(CONFIG, lora=lora))


def test_an_adapters_checkpoint_is_not_resumed_on_another_base(
    saved: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    other = save_tiny_model(tmp_path / "model", seed=1)
    with fails_with(ConfigError, "model.safetensors"):
        load_checkpoint(saved, CONFIG, base=other)
    with fails_with(ConfigError, tmp_path / "gone"):
        load_checkpoint(saved, CONFIG, base=tmp_path / "gone")
    # The same files in another place are the same base.
    moved = shutil.copytree(tiny_model_dir, tmp_path / "moved")
    policy, _ = load_checkpoint(saved, CONFIG, base=moved)
    assert policy.steps == 1


def test_a_checkpoint_of_all_weights_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, Policy.load(tiny_model_dir), tiny_model_dir, {})
    with fails_with(ConfigError, "LoRA", "train.lora"):
        load_checkpoint(path, CONFIG)


def test_a_run_that_is_killed_goes_on_as_if_it_had_not_been(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Killed after the third step, whose checkpoint is that of the second."""

    def run_of(name: str, *more: str) -> Config:
        base = [f"root={tmp_path / name}", f"model.path={tiny_model_dir}", "rollout.eta=9"]
        adapter = ("train.lora.rank=4", "train.lora.alpha=12", "train.lr=1e-2", "train.steps=4")
        return config_of(base, *adapter, "train.checkpoint_every=2", *more)

    episodes = [pair(f"p{k}", turns=1 + k % 2) for k in range(4)]
    whole = Lab(run_of("whole"), list(episodes))
    assert whole.trainer.train()
    expected = outcome(whole)
    assert any("lora_A" in name for name in expected["tensors"])

    config = run_of("killed")
    second = Lab(config, episodes[3:], before=Lab(config, list(episodes)).die("published", 3))
    assert second.trainer.train()
    assert_same_outcome(expected, outcome(second))

    # Its engines have what it trains, and a start that changes nothing publishes nothing.
    newest = max(published_versions(second.trainer.dir.weights))
    assert holds_weights(weights_folder(second.trainer.dir.weights, newest), second.trainer.policy)
    third = Lab(config, [], before=second)
    assert third.trainer.train() and not third.service.published
    with fails_with(ConfigError, "rank 4", "train.lora.rank=8"):
        Lab(run_of("killed", "train.lora.rank=8"), [], before=third).trainer.train()


def test_an_adapter_without_its_base_needs_the_settings_one(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Its policy was made of a model in memory."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype="auto")
    path = save_checkpoint(tmp_path, Policy(model, CONFIG), tiny_model_dir, {})
    with fails_with(ConfigError, "model.path"):
        load_checkpoint(path, CONFIG)
    policy, _ = load_checkpoint(path, CONFIG, base=tiny_model_dir)
    assert policy.base is not None
