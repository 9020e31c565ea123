"""Attention by blocks equals attention with a dense mask, forward and backward."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.support.errors import fails_with
from tests.trainer.test_trie import ancestors, divided, line_of, members
from trainer.flex_tree import TreeMask, tiles
from trainer.tree_attention import TreeNotSupported, TreePass, tree_attention
from trainer.trie import plan_passes

HEADS, SIZE = 4, 8


def random_trie(seed: int) -> tuple[Any, Any]:
    chance = random.Random(seed)
    rows: list[list[int]] = [[0, 1, 2]]
    for _ in range(8):
        base = chance.choice(rows)
        kept = base[: chance.randint(1, len(base))]
        rows.append([*kept, *(chance.randrange(3) for _ in range(chance.randint(1, 9)))])
    built, budget = divided(rows, chance.choice([2, 6, 20, 1000]))
    return built, plan_passes(built, budget)


def dense_attention(built: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The attention [tokens, heads, size] of a whole trie, by a mask."""
    n = len(built.tokens)
    mask = torch.zeros(n, n, dtype=torch.bool)
    for token in range(n):
        mask[token, ancestors(built, token)] = True
    given = (t.transpose(0, 1)[None] for t in (q, k, v))
    out = functional.scaled_dot_product_attention(
        *given, attn_mask=mask.to(q.device), enable_gqa=True
    )
    return out[0].transpose(0, 1)


def attention(module: Any, tree: TreePass, tensors: list[Tensor], way: str) -> Tensor:
    """The result [heads, tokens, size]; by ``chain`` as on other devices than a CPU."""
    q, k, v = (t.transpose(0, 1)[None] for t in tensors)
    if way == "chain":
        from trainer.tree_attention import chain_attention

        past = [leaf for one in tree.past for _, leaf in one.kept[0]]
        out = chain_attention(tree.blocks, SIZE**-0.5, q, k, v, *past)[0]
        tree.kept[0] = [(one, one.detach().requires_grad_()) for one in (k, v)]
        return out
    return tree_attention(module, q, k, v, None, tree=tree)[0][0].transpose(0, 1)


def by_passes(
    built: Any,
    passes: Any,
    draw: list[Tensor],
    upstream: Tensor,
    attend: Callable[[TreePass, list[Tensor]], Tensor],
) -> list[Tensor]:
    """The attention of all passes, [tokens, heads, size], and the gradients of what was drawn."""
    places = [torch.from_numpy(np.array(members(built, one))) for one in passes]
    done: list[tuple[list[Tensor], TreePass, Tensor]] = []
    for number, one in enumerate(passes):
        line = [done[k][1] for k in line_of(passes, number)]
        tree = TreePass(one.blocks, int(built.depths.max()), line, keeps=True)
        own = [t[places[number]].requires_grad_() for t in draw]
        done.append((own, tree, attend(tree, own)))
    result = torch.zeros_like(draw[0])
    found = [torch.zeros_like(t) for t in draw]
    for at, (own, tree, out) in reversed(list(zip(places, done, strict=True))):
        outputs, gradients = tree.collected()
        torch.autograd.backward([out, *outputs], [upstream[at], *gradients])
        result[at] = out.detach()
        for total, tensor in zip(found, own, strict=True):
            assert tensor.grad is not None
            total[at] += tensor.grad
    return [result, *found]


@pytest.mark.parametrize("way", ["blocks", "chain"])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("seed", range(6))
def test_attention_by_blocks_equals_attention_with_a_dense_mask(
    seed: int, key_heads: int, way: str
) -> None:
    built, passes = random_trie(seed)
    n = len(built.tokens)
    g = torch.Generator().manual_seed(seed)
    draw = [
        torch.randn(n, h, SIZE, generator=g, dtype=torch.float64) for h in (4, key_heads, key_heads)
    ]
    dense = [t.clone().requires_grad_() for t in draw]
    expected = dense_attention(built, *dense)
    upstream = torch.randn(expected.shape, generator=g, dtype=torch.float64)
    expected.backward(upstream)

    def attend(tree: TreePass, own: list[Tensor]) -> Tensor:
        return attention(SimpleNamespace(layer_idx=0), tree, own, way).transpose(0, 1)

    result, *found = by_passes(built, passes, draw, upstream, attend)
    torch.testing.assert_close(result, expected, atol=1e-12, rtol=0)
    for total, tensor in zip(found, dense, strict=True):
        torch.testing.assert_close(total, tensor.grad, atol=1e-12, rtol=0)


def test_attention_that_is_not_plain_is_refused() -> None:
    built, (one, *_) = random_trie(0)
    tree = TreePass(one.blocks, 20)
    q = torch.zeros(1, HEADS, int(built.bounds[-1]), SIZE)
    module = SimpleNamespace(layer_idx=0)
    for name, value in [("softcap", 30.0), ("s_aux", q), ("dropout", 0.1), ("is_causal", False)]:
        with pytest.raises(TreeNotSupported):
            tree_attention(module, q, q, q, None, tree=tree, **{name: value})
    with fails_with(TreeNotSupported, "21 tokens", "train.packing=rows"):
        tree_attention(module, q, q, q, None, tree=tree, sliding_window=20)
    tree_attention(module, q, q, q, None, tree=tree, sliding_window=21, use_cache=False)


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(k, marks=pytest.mark.service) for k in range(4, 12))]
)
def test_a_tree_mask_is_the_dense_one(seed: int) -> None:
    """FlexAttention has no backward pass on a CPU; its forward pass sees the same keys."""
    built, passes = random_trie(seed)
    g = torch.Generator().manual_seed(seed)
    n = len(built.tokens)
    draw = [torch.randn(n, h, 16, generator=g, dtype=torch.float64) for h in (4, 2, 2)]
    expected = dense_attention(built, *draw).transpose(0, 1)
    places = [torch.from_numpy(np.array(members(built, one))) for one in passes]
    for number, one in enumerate(passes):
        q, *own = (t[places[number]].transpose(0, 1)[None] for t in draw)
        past = [
            t[places[k]].transpose(0, 1)[None] for k in line_of(passes, number) for t in draw[1:]
        ]
        tree = TreeMask(one.blocks, q.shape[2], q.device)
        out = tree.attention(0.25, q, *own, *past)
        torch.testing.assert_close(out[0], expected[:, places[number]], atol=1e-12, rtol=0)


@pytest.mark.parametrize("seed", range(4))
def test_tiles_are_whole_partial_or_left_out_as_the_mask_says(seed: int) -> None:
    chance = np.random.default_rng(seed)
    rows, columns = (int(n) for n in chance.integers(1, 9, 2))
    ends = np.sort(chance.integers(0, rows * 128 + 1, (columns * 128, 2)), axis=1)
    ends[: columns * 64] = chance.integers(0, rows + 1) * 128, rows * 128
    seen = np.zeros((rows * 128, columns * 128), dtype=bool)
    for key, (first, end) in enumerate(ends):
        seen[first:end, key] = True
    count = seen.reshape(rows, 128, columns, 128).sum(axis=(1, 3))
    whole = count == 128 * 128
    some, some_at, full, full_at = tiles(ends[:, 0], ends[:, 1], rows * 128)
    for row in range(rows):
        assert set(full_at[row, : full[row]]) == set(np.flatnonzero(whole[row]))
        assert set(some_at[row, : some[row]]) == set(np.flatnonzero((count > 0)[row] & ~whole[row]))
