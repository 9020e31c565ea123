"""A model that computes a row differently beside others is found at load, and gets rows alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from any_agent.errors import StartupError
from tests.support.errors import fails_with
from tests.support.trainer.policies import (
    VOCAB,
    assert_same,
    dense_gradients,
    dense_logprobs,
    dense_loss,
    random_rows,
    trainer_gradients,
)
from tests.support.trainer.trees import shaped_model
from trainer.loss import LossConfig
from trainer.model import PolicyConfig, context_of
from trainer.model_probes import rotates_by_length
from trainer.policy import Policy


def limited(model: Any) -> Any:
    """The first layer's experts, here one, take the first forty tokens of a batch."""
    mlp = model.model.layers[0].mlp
    original = mlp.forward

    def forward(x: Tensor) -> Tensor:
        taken = torch.arange(x.shape[0] * x.shape[1]).view(x.shape[:2]) < 40
        return original(x) * taken[..., None]

    mlp.forward = forward
    return model


def two_sets_of_angles() -> Any:
    """One for batches of at most 64 tokens a row, one for longer ones."""
    rope: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 10_000.0}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    lengths = {"max_position_embeddings": 256, "original_max_position_embeddings": 64}
    rope |= {"original_max_position_embeddings": 64}
    return shaped_model("llama", model_type="phi3", rope_parameters=rope, **lengths)


def scaled_beyond_the_context() -> Any:
    rope: dict[str, Any] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    return shaped_model("llama", max_position_embeddings=64, rope_parameters=rope)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (two_sets_of_angles, "scales positions by the longest row of a batch"),
        (lambda: limited(shaped_model("qwen3")), "other hidden states of a row beside other rows"),
    ],
)
def test_a_model_that_looks_at_neighbours_gets_each_row_alone(
    make: Callable[[], Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    policy = Policy(make())
    assert said in caplog.records[-1].getMessage()
    rows = [*random_rows(0, 4, longest=12), *random_rows(3, 2, longest=120)]
    assert max(len(row["input_ids"]) for row in rows) > 64
    assert all(one.ids.shape[0] == 1 for one in policy.runner.plan(rows, 10_000))
    for row, found in zip(rows, policy.runner.row_logprobs(rows), strict=True):
        expected = dense_logprobs(policy.model, row).detach()
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
    loss, got = trainer_gradients(policy, rows)
    assert loss == pytest.approx(float(dense_loss(policy.model, rows, LossConfig()).detach()))
    assert_same(got, dense_gradients(policy, rows, LossConfig()), atol=1e-10)


@pytest.mark.parametrize(
    ("rope", "most"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "dynamic", "factor": 4.0}, 64),
        ({"rope_type": "default"}, 64),
    ],
)
def test_the_context_is_that_of_scaled_positions(rope: dict[str, Any], most: int) -> None:
    rope |= {"rope_theta": 10_000.0}
    model = shaped_model("llama", max_position_embeddings=64, rope_parameters=rope)
    assert context_of(model) == most


@pytest.mark.parametrize("kind", ["deepseek_v2", "llama4_text", "gemma3_text"])
def test_rotations_of_other_shapes_are_understood(kind: str) -> None:
    """Those of the first two are one complex tensor; the third has two kinds of layers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "head_dim": 8}
    config = AutoConfig.for_model(kind, vocab_size=VOCAB, intermediate_size=16, **shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    rotary = next(m for m in model.modules() if hasattr(m, "rope_type"))
    rotary = type(rotary)(config)
    assert not rotates_by_length(rotary, 4096, torch.zeros(1))


def test_rows_beyond_the_context_are_refused_which_would_change_those_beside_them() -> None:
    """Its angles would depend on the longest row so far."""
    policy = Policy(scaled_beyond_the_context())
    assert (policy.runner.packing, policy.runner.context) == ("tree", 64)
    rows = random_rows(3, 2, longest=120)
    with fails_with(ValueError, "context of 64"):
        policy.train(rows)
    assert policy.steps == 0


def test_a_policy_and_its_reference_get_the_same_passes() -> None:
    plain, odd = Policy(shaped_model("qwen3")).runner, Policy(limited(shaped_model("qwen3"))).runner
    odd.compute_like(plain)
    assert odd.packing == "alone"
    plain.compute_like(odd)
    assert plain.packing == "alone"


def test_a_model_with_noise_in_training_mode_is_refused() -> None:
    model = shaped_model("qwen3")
    original = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda x: functional.dropout(
        original(x), 0.3, training=model.training
    )
    assert Policy(model).runner.packing == "tree"
    with fails_with(StartupError, "gradient_checkpointing=false"):
        Policy(model, PolicyConfig(gradient_checkpointing=True))


def test_dropout_that_a_module_keeps_as_a_number_is_switched_off() -> None:
    shape: dict[str, Any] = {"word_embed_proj_dim": 32, "ffn_dim": 48}
    shape |= {"dropout": 0.4, "attention_dropout": 0.4}
    model = shaped_model("llama", model_type="opt", **shape)
    assert Policy(model, PolicyConfig(gradient_checkpointing=True)).runner.packing == "tree"
