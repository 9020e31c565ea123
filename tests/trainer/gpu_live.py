"""Training on a GPU computes what a CPU does: attention, log-probabilities, gradients."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.trainer.policies import assert_same
from tests.support.trainer.trees import relative, shaped_model, tree_rows
from tests.trainer.test_tree import computed
from tests.trainer.test_tree_attention import by_passes, dense_attention, random_trie
from trainer.model import PolicyConfig
from trainer.policy import Policy
from trainer.rows import Row
from trainer.tree_attention import TreePass, tree_attention
from trainer.trie import plan_passes, trie_of
from trainer.world import leave


@pytest.fixture(autouse=True)
def a_gpu() -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.fail("no CUDA GPU is here")
    torch.compiler.reset()
    yield
    leave()


def large_trie(seed: int, budget: int) -> tuple[Any, Any]:
    """A trie whose nodes have up to some hundred tokens, over several tiles of the kernel."""
    chance = np.random.default_rng(seed)
    rows = [chance.integers(0, 1000, 200)]
    for _ in range(10):
        base = rows[chance.integers(len(rows))]
        kept = base[: chance.integers(1, len(base) + 1)]
        rows.append(np.concatenate([kept, chance.integers(0, 1000, chance.integers(1, 400))]))
    rows = [row.astype(np.int32) for row in rows]
    places = [np.array([len(row) - 1]) for row in rows]
    built = trie_of(rows, places, [b""] * len(rows), longest_node=max(budget // 2, 1))
    return built, plan_passes(built, budget)


def attend(tree: TreePass, own: list[Tensor]) -> Tensor:
    """The attention of a pass, [tokens, heads, size], by the kernel."""
    q, k, v = (t.transpose(0, 1)[None] for t in own)
    out = tree_attention(SimpleNamespace(layer_idx=0), q, k, v, None, tree=tree)[0][0]
    assert tree.mask is not None
    return out


@pytest.mark.parametrize("size", [16, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(4))
def test_attention_on_a_gpu_equals_that_of_a_dense_mask(
    seed: int, dtype: torch.dtype, size: int
) -> None:
    tries = [random_trie(seed), large_trie(seed, 100_000), large_trie(seed, 700)]
    for built, passes in tries:
        n = len(built.tokens)
        g = torch.Generator().manual_seed(seed)
        draw = [torch.randn(n, h, size, generator=g).cuda().to(dtype) for h in (4, 2, 2)]
        upstream = torch.randn(n, 4, size, generator=g).cuda().to(dtype)
        dense = [t.double().requires_grad_() for t in draw]
        expected = dense_attention(built, *dense)
        expected.backward(upstream.double())
        bound = 2e-6 if dtype == torch.float32 else 0.02
        wanted = [expected.detach(), *(t.grad for t in dense)]
        parts = by_passes(built, passes, draw, upstream, attend)
        for found, exact in zip(parts, wanted, strict=True):
            assert exact is not None and relative(found, exact) < bound


def policy(shape: str, dtype: torch.dtype | None = None, **settings: Any) -> Policy:
    """Heads of 16, the smallest of the kernel."""
    settings = {"device": "cuda", "dtype": dtype} | settings
    return Policy(shaped_model(shape, torch.float32, head_dim=16), PolicyConfig(**settings))


def whole(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: (t.full_tensor() if hasattr(t, "full_tensor") else t).cpu().float()
        for name, t in found.items()
    }


@pytest.mark.parametrize("packing", ["rows", "tree"])
@pytest.mark.parametrize(
    ("shape", "budget", "compile"),
    [
        *((s, n, False) for s in ("qwen3", "llama", "gemma", "mistral") for n in (60, 10_000)),
        *((shape, 60, True) for shape in ("qwen3", "gemma")),
    ],
)
def test_gradients_are_those_of_a_cpu(shape: str, budget: int, compile: bool, packing: str) -> None:
    rows = tree_rows(1, torch.float32, count=40)
    logprobs, loss, expected = computed(policy(shape, device="cpu", packing="rows"), rows)
    one = policy(shape, packing=packing, compile=compile)
    assert (one.runner.packing, one.runner.fused) == (packing, compile)
    found, again, got = computed(one, rows, budget)
    assert again == pytest.approx(loss, rel=1e-5)
    assert relative(torch.cat(found), torch.cat(logprobs)) < 1e-5
    for name, tensor in whole(got).items():
        assert relative(tensor, expected[name]) < 1e-4, name


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("saving", ["", "gradient_checkpointing", "offload"])
def test_bfloat16_is_no_rougher_than_by_rows(saving: str, compile: bool) -> None:
    rows = tree_rows(2, torch.float32, count=60)
    logprobs, _, exact = computed(policy("qwen3", device="cpu", packing="rows"), rows)
    errors = {}
    for packing in ("rows", "tree"):
        fused = compile and packing == "tree"
        more = {saving: True} if saving else {}
        one = policy("qwen3", torch.bfloat16, packing=packing, compile=fused, **more)
        assert (one.runner.packing, one.runner.fused) == (packing, fused)
        found, _, got = computed(one, rows)
        gradients = whole(got)
        errors[packing] = (
            relative(torch.cat(found), torch.cat(logprobs)),
            sum(relative(gradients[name], exact[name]) for name in exact),
        )
        leave()
    print(saving or "plain", errors)
    for of_tree, of_rows in zip(errors["tree"], errors["rows"], strict=True):
        assert 0 < of_tree <= 1.2 * of_rows


@pytest.mark.parametrize("compile", [False, True])
def test_a_step_is_repeated_bit_for_bit(compile: bool) -> None:
    rows: list[Row] = tree_rows(3, torch.float32, count=40)
    results = []
    for _ in range(2):
        torch.compiler.reset()
        one = policy("qwen3", torch.bfloat16, lr=1e-3, compile=compile)
        norms = [one.train(rows).grad_norm for _ in range(3)]
        results.append((norms, whole(dict(one.model.state_dict()))))
        leave()
    (norms, weights), (again, others) = results
    assert again == norms
    assert_same(others, weights, atol=0.0)
