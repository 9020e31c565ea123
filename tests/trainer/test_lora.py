"""LoRA: the same policy as with merged weights, in the trainer, in every engine, after a resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import any_agent.launcher.trial
from any_agent.config import load_config
from any_agent.engine.embedded.weight_loading import apply_weights, fit_weights
from any_agent.errors import ConfigError
from tests.support.errors import fails_with
from tests.support.trainer.adapters import (
    CONFIG,
    LORA,
    adapted_policy,
    all_gradients,
    full_policy,
    gradients_of_adapter,
    plain_sums,
    row_logprobs,
    stirred,
    train,
    weights_of,
)
from tests.support.trainer.policies import random_rows, small_policy
from tests.support.trainer.trees import SHAPES, shaped_model, shaped_policy, tree_rows
from trainer.adapter_files import save_adapter
from trainer.from_config import policy_config
from trainer.lora import Lora, adapter_tensors, layers
from trainer.model import PolicyConfig
from trainer.policy import Policy
from trainer.reference import frozen_logprobs
from trainer.weight_folders import holds_weights, publish_to_disk


def test_the_first_version_of_an_adapter_is_the_base_bit_for_bit(tiny_model_dir: Path) -> None:
    rows = random_rows(0, dtype=torch.float32)
    base, policy = Policy.load(tiny_model_dir), Policy.load(tiny_model_dir, CONFIG)
    expected, found = weights_of(base), weights_of(policy)
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    for one, other in zip(row_logprobs(base, rows), row_logprobs(policy, rows), strict=True):
        assert torch.equal(one, other)


def test_training_an_adapter_changes_no_weight_of_the_base(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    policy = Policy.load(tiny_model_dir, CONFIG)
    before = {n: p.detach().clone() for n, p in policy.model.named_parameters()}
    adapter = adapter_tensors(policy.model)
    assert [n for n, p in policy.model.named_parameters() if p.requires_grad] == list(adapter)
    assert len(adapter) == 2 * 2 * 7, "A and B of seven linear layers in two decoder layers"
    train(policy, range(2))
    for name, parameter in policy.model.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, before[name]) != (name in adapter), name
    assert {id(p) for p in policy.optimizer.state} == {id(p) for p in adapter.values()}


def gradients_by_the_chain_rule(policy: Policy, rows: list[Any]) -> dict[str, torch.Tensor]:
    """Gradients by the chain rule from G, each whole weight's: s B'G for A, s GA' for B."""
    policy.config = replace(policy.config, packing="rows")
    _, whole = all_gradients(full_policy(policy), rows)
    out = {}
    for name, layer in layers(policy.model).items():
        a, b = (getattr(layer, part)["default"].weight.detach() for part in ("lora_A", "lora_B"))
        scale = policy.config.lora.alpha / policy.config.lora.rank  # type: ignore[union-attr]
        out[f"{name}.lora_A.default.weight"] = scale * b.T @ whole[f"{name}.weight"]
        out[f"{name}.lora_B.default.weight"] = scale * whole[f"{name}.weight"] @ a.T
    return out


@pytest.mark.parametrize(
    "config",
    [
        {"packing": "rows"},
        {"packing": "tree"},
        {"packing": "tree", "head_chunk": 3, "gradient_checkpointing": True},
        {"lora": Lora(3, 2, ("v_proj", "0.mlp.down_proj"))},
        {"lora": Lora(1, 1, ("1.mlp.down_proj",))},
    ],
    ids=["rows", "tree", "checkpointing", "some layers", "the last layer"],
)
@pytest.mark.service
def test_gradients_are_those_of_whole_weights(config: dict[str, Any]) -> None:
    for seed, budget in ((1, 40), (2, 9)):
        policy = adapted_policy(**config)
        for rows in (random_rows(seed), tree_rows(seed)):
            _, found = gradients_of_adapter(policy, rows, budget)
            expected = gradients_by_the_chain_rule(adapted_policy(**config), rows)
            assert found.keys() == expected.keys()
            for name, tensor in expected.items():
                assert tensor.abs().max() > 1e-6, "comparing zeros proves nothing"
                torch.testing.assert_close(found[name], tensor, atol=1e-10, rtol=1e-8, msg=name)


def test_without_the_adapter_it_is_the_base_bit_for_bit() -> None:
    policy, rows = adapted_policy(torch.float32), tree_rows(4, torch.float32)
    base = small_policy(dtype=torch.float32)
    with_it = row_logprobs(policy, rows)
    bare = policy.runner.of_rows(frozen_logprobs("", policy, base=True), rows)
    for one, other in zip(row_logprobs(base, rows), bare, strict=True):
        assert torch.equal(one, other)
    again = row_logprobs(policy, rows)
    assert all(torch.equal(a, b) for a, b in zip(with_it, again, strict=True))
    assert not torch.equal(torch.cat(again), torch.cat(row_logprobs(base, rows)))
    # It is trained afterwards, as it was before.
    policy.train(rows, 40)
    assert all(p.requires_grad for p in adapter_tensors(policy.model).values())
    assert not torch.equal(torch.cat(row_logprobs(policy, rows)), torch.cat(again))


def published_is_trained(model: Path, folder: Path) -> None:
    """A fresh model from the published folder has the trainer's log-probabilities."""
    policy = stirred(Policy.load(model, CONFIG))
    rows = random_rows(5, dtype=torch.float32)
    trained = torch.cat(row_logprobs(policy, rows))
    path = publish_to_disk(policy, model, folder, 1)
    fresh = Policy(
        AutoModelForCausalLM.from_pretrained(path, dtype="auto"), PolicyConfig(threads=1)
    )
    base = torch.cat(row_logprobs(Policy.load(model), rows))
    assert (base - trained).abs().max() > 0.1, "an adapter that does nothing proves nothing"
    assert (torch.cat(row_logprobs(fresh, rows)) - trained).abs().max() < 1e-4
    # As the engines get it in buckets.
    by_buckets = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    sent = dict(pair for bucket in policy.buckets(3000) for pair in bucket)
    apply_weights(by_buckets, fit_weights(by_buckets, sent))
    for name, tensor in by_buckets.state_dict().items():
        assert torch.equal(tensor, fresh.model.state_dict()[name]), name


def test_engines_load_the_weights_that_an_adapter_trained(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    published_is_trained(tiny_model_dir, tmp_path)
    published, base = (
        AutoModelForCausalLM.from_pretrained(path).state_dict().keys()
        for path in (tmp_path / "v00000001", tiny_model_dir)
    )
    assert published == base


def merged_weights_are_exact(model: Path, folder: Path) -> None:
    """But for the rounding of float32, whose 24 bits are those of each number."""
    policy = stirred(Policy.load(model, CONFIG))
    found, expected = weights_of(policy), plain_sums(policy)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name].double(), tensor, atol=1e-6, rtol=1e-6, msg=name)


def test_merged_weights_are_exact_and_always_the_same(tiny_model_dir: Path, tmp_path: Path) -> None:
    merged_weights_are_exact(tiny_model_dir, tmp_path)
    policy = stirred(Policy.load(tiny_model_dir, CONFIG))
    once, again = weights_of(policy), weights_of(policy)
    half = weights_of(policy, torch.bfloat16)
    for name, tensor in once.items():
        assert torch.equal(tensor, again[name])
        assert torch.equal(tensor.bfloat16(), half[name]), "rounded once, after the sum"


def test_a_folder_is_recognised_until_the_next_step(tiny_model_dir: Path, tmp_path: Path) -> None:
    policy = stirred(Policy.load(tiny_model_dir, CONFIG))
    path = publish_to_disk(policy, tiny_model_dir, tmp_path, 1)
    assert holds_weights(path, policy)
    assert holds_weights(path, stirred(Policy.load(tiny_model_dir, CONFIG)))
    train(policy, range(1))
    assert not holds_weights(path, policy)


def test_the_first_adapter_depends_on_its_seed_alone() -> None:
    def first(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed + 100)
        policy = small_policy(lora=replace(LORA, seed=seed % 2))
        return [p.detach() for p in adapter_tensors(policy.model).values()]

    one, same, other = first(0), first(2), first(1)
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(one[::2], other[::2], strict=True))
    assert not any(b.any() for b in one[1::2])


@pytest.mark.parametrize("name", ["q_prj", "lm_head", "embed_tokens", "input_layernorm"])
def test_a_layer_that_the_model_lacks_is_refused(name: str) -> None:
    with fails_with(ConfigError, f"named {name}", "down"):
        small_policy(lora=Lora(targets=("q_proj", name)))


def test_a_missing_peft_is_named_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    train = load_config(None, ["train.lora.rank=4", "train.seed=3"], environ={}).train
    assert policy_config(train).lora == Lora(4, 32, (), 3)
    monkeypatch.setattr(any_agent.launcher.trial, "find_spec", lambda name: None)
    with fails_with(ConfigError, "any-agent-rl[lora]"):
        policy_config(train)
    assert policy_config(load_config(None, [], environ={}).train).lora is None


@pytest.mark.parametrize("shape", SHAPES)
def test_an_adapter_equals_its_merged_weights_in_every_shape_of_model(shape: str) -> None:
    """Tied embeddings and heads among them."""
    policy = stirred(shaped_policy(shape, lora=LORA))
    rows = tree_rows(6)
    model = shaped_model(shape)
    model.load_state_dict(weights_of(policy), strict=False)
    expected = row_logprobs(Policy(model, PolicyConfig()), rows)
    assert weights_of(policy).keys() == weights_of(shaped_policy(shape)).keys()
    for one, other in zip(row_logprobs(policy, rows, 40), expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=0)


EXPERTS: dict[str, dict[str, Any]] = {
    # The first layer is dense, with names that experts have in other layers.
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 16, "mlp_only_layers": [0]},
    "mixtral": {"num_local_experts": 4},
}


@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_get_no_adapter_and_are_published_unchanged(kind: str, tmp_path: Path) -> None:
    """They are no linear layers; what is published is loaded by its names in files all the same."""
    shape = EXPERTS[kind] | {"model_type": kind, "num_experts_per_tok": 2}
    base = shaped_model("llama", torch.float32, **shape)
    base.save_pretrained(tmp_path / "base")
    policy = stirred(Policy.load(tmp_path / "base", CONFIG))
    kinds = {name.rpartition(".")[2] for name in layers(policy.model)}
    assert kinds == {"q_proj", "k_proj", "v_proj", "o_proj"}
    rows = tree_rows(9, torch.float32)
    expected = torch.cat(row_logprobs(policy, rows))
    folder = tmp_path / "published"
    folder.mkdir()
    save_file(weights_of(policy), folder / "model.safetensors", metadata={"format": "pt"})
    policy.model.config.save_pretrained(folder)
    save_adapter(policy, folder / "adapter")
    bare = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    by_peft = PeftModel.from_pretrained(bare, folder / "adapter").merge_and_unload()
    for model in (by_peft, AutoModelForCausalLM.from_pretrained(folder)):
        model.requires_grad_(True)
        found = torch.cat(row_logprobs(Policy(model, PolicyConfig(threads=1)), rows))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    with fails_with(ConfigError, "train.lora.target_modules"):
        Policy.load(tmp_path / "base", replace(CONFIG, lora=Lora(targets=("gate_proj", "up_proj"))))


def test_a_model_without_linear_layers_is_refused() -> None:
    config = GPT2Config(n_embd=32, n_head=4, n_layer=1, vocab_size=48)
    with fails_with(ConfigError, "GPT2LMHeadModel", "LoRA"):
        Policy(GPT2LMHeadModel(config), PolicyConfig(lora=LORA))
