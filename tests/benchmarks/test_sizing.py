"""Sizing counts the same as torch and transformers hold, keep and compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from benchmarks.gpu import sizing
from benchmarks.gpu.shapes import SHAPES, Shape
from tests.trainer.test_pass_size import kept

SMALL = [
    Shape("a", 2, 256, 4, 2, 768, head_dim=64, vocab=512, tied=True),
    Shape("b", 2, 256, 8, 2, 1024, head_dim=64, vocab=512),
    Shape("c", 2, 512, 8, 4, 1024, head_dim=64, vocab=512, tied=True),
]


def model_of(shape: Shape, **how: Any) -> Any:
    return AutoModelForCausalLM.from_config(shape.config(), **how)


@pytest.mark.parametrize("name", SHAPES)
def test_the_number_of_parameters_equals_the_models(name: str) -> None:
    with torch.device("meta"):
        model = model_of(SHAPES[name])
    assert model.num_parameters() == SHAPES[name].parameters


@pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.name)
def test_bytes_kept_for_the_backward_pass_equal_what_torch_keeps(shape: Shape) -> None:
    tokens = 256
    model = model_of(shape, dtype=torch.bfloat16, attn_implementation="sdpa")
    both = kept(model, tokens)
    model.model.layers = torch.nn.ModuleList(list(model.model.layers)[:1])
    measured = (both - kept(model, tokens)) / tokens
    assert sizing.layer_activations(shape) == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.name)
def test_the_work_of_a_pass_equals_what_torch_counts(shape: Shape) -> None:
    """Torch counts all pairs of tokens, causal or not."""
    model = model_of(shape, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.ones(3, 64, dtype=torch.long), use_cache=False)
    work = shape.forward_flops(3 * 64, 3 * 64 * 64, 3 * 64)
    assert counter.get_total_flops() == pytest.approx(work)


def test_the_size_of_the_cache_equals_that_of_transformers() -> None:
    shape = SMALL[0]
    model = model_of(shape, dtype=torch.bfloat16)
    cache = model(input_ids=torch.ones(1, 10, dtype=torch.long), use_cache=True).past_key_values
    size = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert size == 10 * shape.cache_bytes


def test_the_state_of_training_equals_what_torch_holds() -> None:
    shape = SMALL[0]
    model = model_of(shape, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.sum().backward()
    optimizer.step()
    held = [t for p in model.parameters() for t in (p, p.grad, *optimizer.state[p].values())]
    # The optimizer counts its steps in tensors of one number.
    size = sum(t.nbytes for t in held if t.ndim)
    whole = sizing.training(shape, 1, tokens=1)
    assert (whole.state, whole.host) == (size, 0)
    assert sizing.training(shape, 4, tokens=1).state == size / 4
    offloaded = sizing.training(shape, 2, tokens=1, offload=True)
    assert (offloaded.state, offloaded.host) == (0, size / 2)


def test_more_gpus_or_larger_ones_hold_more() -> None:
    for name in sizing.MODELS:
        shape = SHAPES[name]
        found = [sizing.training_gpus(shape, card) or 1000 for card in sizing.CARDS.values()]
        assert found == sorted(found, reverse=True)
        # What it says fits, and half as many do not hold.
        for card, n in zip(sizing.CARDS.values(), found, strict=True):
            if n in (1, 1000):
                continue
            limit = sizing.USABLE * card * sizing.GB
            assert sizing.training(shape, n, tokens=16_384).total <= limit
            assert sizing.training(shape, n // 2, tokens=16_384).total > limit
    assert sizing.serving_gpus(SHAPES["32B"], 24, cached_tokens=10_000_000) is None
