"""Attention over a tree of tokens on a GPU, by torch's FlexAttention.

The descendants of a token follow it without a gap: a key is seen by one interval of queries. From
these intervals follow the blocks of a pass that have something to compute, without a mask of
[queries, keys], and one kernel computes them all.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from trainer.compiling import compiled, reason_of
from trainer.trie import Block, Ints

log = logging.getLogger(__name__)

TILE = 128
"""The queries, and the keys, of a block of the kernel."""
_LEAST_SIZE = 16
"""The smallest head that the kernel computes."""


def has_kernel(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return True if the kernel can compute attention with such heads, forward and backward.

    The first call for a kind of heads tries it, which compiles it for the first pass, too.
    """
    if query.device.type != "cuda":
        return False
    heads, key_heads = query.shape[1], key.shape[1]
    sizes = query.shape[-1], value.shape[-1]
    if query.dtype == torch.float64 or min(sizes) < _LEAST_SIZE:
        return False
    return _works(query.device, query.dtype, heads, key_heads, *sizes)


@cache
def _works(
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    key_heads: int,
    size: int,
    value_size: int,
) -> bool:
    tokens = 2 * TILE
    mask = TreeMask([Block(0, tokens, 0, tokens, causal=True)], tokens, device)
    query, key, value = (
        torch.ones(1, h, tokens, s, dtype=dtype, device=device, requires_grad=True)
        for h, s in ((heads, size), (key_heads, size), (key_heads, value_size))
    )
    try:
        with torch.enable_grad():
            torch.autograd.backward(mask.attention(size**-0.5, query, key, value).sum())
    except Exception as error:
        # Without a compiler, or on a card without enough shared memory.
        log.warning(
            "FlexAttention does not work here, so prefix trees are computed node by node, which "
            "is slower: %s",
            reason_of(error),
        )
        return False
    return True


class TreeMask:
    """The keys that each query of a pass sees: its own tokens', then those of ancestor passes.

    Both are padded to whole tiles, and two at least: the kernel is compiled for these.
    """

    def __init__(self, blocks: Sequence[Block], tokens: int, device: torch.device) -> None:
        self._tokens = tokens
        self._padded = max(_whole_tiles(tokens), 2 * TILE)
        self._past = [block for block in blocks if block.level is not None]
        first, end = seen_by(blocks, self._padded)
        self._keys = len(first)
        from_, to = (torch.from_numpy(t.astype(np.int32)).to(device) for t in (first, end))

        def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (from_[key] <= query) & (query < to[key])

        counts, indices, whole_counts, whole_indices = (
            torch.from_numpy(t)[None, None].to(device) for t in tiles(first, end, self._padded)
        )
        self._mask = BlockMask.from_kv_blocks(
            *(counts, indices, whole_counts, whole_indices),
            BLOCK_SIZE=TILE,
            mask_mod=sees,
            seq_lengths=(self._padded, self._keys),
        )

    def attention(
        self, scale: float, query: Tensor, key: Tensor, value: Tensor, *past: Tensor
    ) -> Tensor:
        """Return attention [1, heads, tokens, size]; ``past``: the ancestors' keys and values."""
        query, key, value = (_to_length(t, self._padded) for t in (query, key, value))
        parts = ([key], [value])
        for block in self._past:
            for k, part in enumerate(parts):
                whole = past[2 * (block.level or 0) + k]
                part.append(whole[:, :, block.key : block.key + block.keys])
        if self._past:
            key, value = (_to_length(torch.cat(part, dim=2), self._keys) for part in parts)
        kernel: Any = _kernel() if query.device.type == "cuda" else flex_attention
        out: Tensor = kernel(query, key, value, block_mask=self._mask, scale=scale, enable_gqa=True)
        return out[:, :, : self._tokens]


@cache
def _kernel() -> Any:
    # Whole: else it would compute all [queries, keys] where it had been compiled too often.
    return compiled(flex_attention, dynamic=True, fullgraph=True)


def _whole_tiles(tokens: int) -> int:
    return -(-tokens // TILE) * TILE


def _to_length(tensor: Tensor, tokens: int) -> Tensor:
    missing = tokens - tensor.shape[2]
    # In one layout, or the kernel would be compiled for each.
    return functional.pad(tensor, (0, 0, 0, missing)) if missing else tensor.contiguous()


def seen_by(blocks: Sequence[Block], tokens: int) -> tuple[Ints, Ints]:
    """Return the first query that sees each key, and the end of those that do; [keys] each.

    The pass's own ``tokens`` come first, then the keys of each block of an ancestor pass. Tokens
    beyond those of the blocks see themselves, and keys that fill a tile are not seen.
    """
    own_end = np.arange(tokens) + 1
    for block in (block for block in blocks if block.level is None):
        for start in range(block.key, block.key + block.count * block.keys, block.keys):
            queries = start if block.causal else block.query
            own_end[start : start + block.keys] = queries + block.queries
    past = [block for block in blocks if block.level is not None]
    first = [np.arange(tokens), *(np.full(b.keys, b.query) for b in past)]
    end = [own_end, *(np.full(b.keys, b.query + b.queries) for b in past)]
    total = sum(map(len, first))
    filling = np.zeros(_whole_tiles(total) - total, dtype=np.int64)
    return np.concatenate([*first, filling]), np.concatenate([*end, filling])


def tiles(first: Ints, end: Ints, queries: int) -> tuple[Any, Any, Any, Any]:
    """Return BlockMask's counts and indices of tiles that are seen in part, and in whole; int32.

    Counts are [tiles of queries], indices [tiles of queries, tiles of keys], the seen ones first.
    Queries and keys fill their tiles.
    """
    starts = np.arange(0, queries, TILE)
    first, end = first.reshape(-1, TILE, 1), end.reshape(-1, TILE, 1)
    some = ((first < starts + TILE) & (end > starts) & (first < end)).any(axis=1)
    whole = ((first <= starts) & (end >= starts + TILE)).all(axis=1)
    return (*_listed((some & ~whole).T), *_listed(whole.T))


def _listed(seen: Any) -> tuple[Any, Any]:
    order = np.argsort(~seen, axis=1, kind="stable")
    return seen.sum(axis=1).astype(np.int32), order.astype(np.int32)
