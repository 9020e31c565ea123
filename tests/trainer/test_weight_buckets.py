"""Weights in buckets: whole, once, under a checkpoint's names, and no bigger than asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    HrmTextConfig,
    HrmTextForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.core_model_loading import revert_weight_conversion

from tests.support.errors import fails_with
from tests.support.trainer.policies import VOCAB, assert_same, small_policy
from trainer.policy import Policy

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def _all(policy: Policy, nbytes: int, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    pairs = [pair for bucket in policy.buckets(nbytes, dtype) for pair in bucket]
    assert len({name for name, _ in pairs}) == len(pairs)
    return dict(pairs)


def _saved(policy: Policy, folder: Path) -> dict[str, Tensor]:
    policy.model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("nbytes", [1, 5000, 1 << 30])
def test_buckets_hold_the_checkpoints_weights_within_their_size(
    tmp_path: Path, nbytes: int
) -> None:
    policy = small_policy(dtype=torch.float32)
    expected, got = _saved(policy, tmp_path), _all(policy, nbytes)
    assert_same(got, expected, atol=0)
    assert not any(tensor.requires_grad for tensor in got.values())
    for bucket in policy.buckets(nbytes):
        assert len(bucket) == 1 or sum(t.nbytes for _, t in bucket) <= nbytes


def test_tied_weights_are_sent_once(tmp_path: Path) -> None:
    policy = Policy(Qwen3ForCausalLM(Qwen3Config(**_SHAPE, tie_word_embeddings=True)))
    got = _all(policy, 5000)
    assert "lm_head.weight" not in got
    assert got.keys() == _saved(policy, tmp_path).keys()


def test_experts_that_the_model_holds_as_one_come_as_the_checkpoint_splits_them(
    tmp_path: Path,
) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    policy = Policy(Qwen3MoeForCausalLM(Qwen3MoeConfig(**_SHAPE, **experts)))
    expected, got = _saved(policy, tmp_path), _all(policy, 5000)
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in got
    assert_same(got, expected, atol=0)


@pytest.mark.parametrize("nbytes", [1, 20_000])
def test_a_tensor_that_a_checkpoint_has_as_one_is_sent_in_one_bucket(
    tmp_path: Path, nbytes: int
) -> None:
    """The model holds parts of it that are not even neighbours (q, k, v, o, gate)."""
    drawn = HrmTextForCausalLM(HrmTextConfig(**_SHAPE))
    drawn.save_pretrained(tmp_path)
    for model in (drawn, AutoModelForCausalLM.from_pretrained(tmp_path)):
        expected = revert_weight_conversion(model, model.state_dict())
        assert "model.L_module.layers.0.mlp.gate_up_proj.weight" in expected
        got = _all(Policy(model), nbytes)
        assert_same(got, dict(expected), atol=0)


def test_floats_come_in_the_type_that_is_asked_for() -> None:
    policy = small_policy(dtype=torch.float32)
    whole, half = _all(policy, 5000), _all(policy, 5000, torch.bfloat16)
    for name, tensor in whole.items():
        assert torch.equal(half[name], tensor.bfloat16())
    counts = [len(list(policy.buckets(20_000, dtype))) for dtype in (None, torch.bfloat16)]
    assert counts[1] < counts[0], "room is counted in the type that is sent"
    with fails_with(ValueError, "room"):
        next(policy.buckets(0))
