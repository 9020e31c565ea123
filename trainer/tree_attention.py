"""Attention over a tree of tokens, as an attention implementation of transformers.

Every token attends to its ancestors and to itself. All tokens of a pass are one sequence, so that
the model's other layers see no difference; this function alone knows the tree, from the argument
``tree`` that transformers passes on to it. The keys of a node serve all its descendants at once,
since these follow it without a gap. On a CPU attention is computed block by block, and the results
are combined by their log-sum-exps (arXiv 2310.01889), forward and backward: so no mask exists, and
no key is copied. On a GPU one kernel computes the blocks (:mod:`trainer.flex_tree`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from trainer.flex_tree import TreeMask, has_kernel
from trainer.trie import Block

NAME = "any_agent_tree"
_HARMLESS = {
    *("position_ids", "use_cache", "cache_position", "return_dict"),
    *("output_attentions", "output_hidden_states", "output_router_logits"),
}
"""Arguments of a model's layers that do not concern attention."""


class TreeNotSupported(ValueError):
    """A kind of attention that this function does not compute."""


class TreePass:
    """One pass, as attention sees it.

    No dataclass: FSDP2 copies those among a layer's arguments, and what a layer keeps would be
    lost.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        deepest: int,
        past: Sequence[TreePass] = (),
        keeps: bool = False,
    ) -> None:
        self.blocks = blocks
        self.deepest = deepest
        """The greatest position of a token."""
        self.past = past
        """The ancestor passes, from the root on."""
        self.keeps = keeps
        """Other passes descend from this one: keep its keys and values."""
        self.kept: dict[int, list[tuple[Tensor, Tensor]]] = {}
        """Each layer's keys and values, [1, heads, tokens, size], as the pass computed them; and
        the same numbers, detached, for descendants, where the gradients are collected."""
        self.layers: set[int] = set()
        """The layers that computed their attention by this."""
        self.mask: TreeMask | None = None
        """The keys that each query sees, once FlexAttention has begun with this pass."""

    def collected(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return the keys and values that descendants used, and the gradients for them."""
        kept = [both for of_layer in self.kept.values() for both in of_layer]
        used = [(tensor, leaf.grad) for tensor, leaf in kept if leaf.grad is not None]
        return [tensor for tensor, _ in used], [grad for _, grad in used]


def tree_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree: TreePass | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return the attention [1, tokens, heads, size] of a pass; without ``tree``, that of rows.

    ``query``, ``key`` and ``value`` are [1, heads, tokens, size]. Raises TreeNotSupported for
    attention that is not plainly causal.
    """
    if tree is None:
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            sliding_window=sliding_window,
            **others,
        )
    causal = others.pop("is_causal", None)
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise TreeNotSupported("its attention is not causal")
    given = [name for name, one in others.items() if one is not None and name not in _HARMLESS]
    if given or dropout:
        raise TreeNotSupported(f"its attention has {', '.join(sorted(given)) or 'dropout'}")
    if sliding_window is not None and tree.deepest >= sliding_window:
        raise TreeNotSupported(
            f"a row has {tree.deepest + 1} tokens, more than the model's sliding window of "
            f"{sliding_window}: set train.packing=rows"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    past = [leaf for one in tree.past for _, leaf in one.kept[module.layer_idx]]
    if query.device.type == "cpu" and query.shape[-1] == value.shape[-1]:
        out: Tensor = _BlockAttention.apply(  # type: ignore[no-untyped-call]
            tree.blocks, scale, query, key, value, *past
        )
    elif has_kernel(query, key, value):
        if tree.mask is None:
            tree.mask = TreeMask(tree.blocks, query.shape[2], query.device)
        out = tree.mask.attention(scale, query, key, value, *past)
    else:
        out = chain_attention(tree.blocks, scale, query, key, value, *past)
    tree.layers.add(module.layer_idx)
    if tree.keeps and module.layer_idx not in tree.kept:
        # Either may be frozen, as where an adapter changes only the values.
        tree.kept[module.layer_idx] = [
            (one, one.detach().requires_grad_(one.requires_grad and torch.is_grad_enabled()))
            for one in (key, value)
        ]
    return out.transpose(1, 2), None


AttentionInterface.register(NAME, tree_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def chain_attention(
    blocks: Sequence[Block], scale: float, query: Tensor, key: Tensor, value: Tensor, *past: Tensor
) -> Tensor:
    """Return attention [1, heads, tokens, size], node by node over the keys of its ancestors.

    It uses public functions only, on any device, and copies each node's keys and values.
    """
    out = []
    for block in (block for block in blocks if block.causal):
        for start in range(block.query, block.query + block.count * block.queries, block.queries):
            end = start + block.queries
            seen = [b for b in blocks if not b.causal and b.query <= start < b.query + b.queries]
            seen.append(Block(start, block.queries, start, block.queries))
            sources = [(b, _source(b, (key, value), past)) for b in seen]
            keys, values = (
                torch.cat([given[k][:, :, b.key : b.key + b.keys] for b, given in sources], dim=2)
                for k in (0, 1)
            )
            out.append(
                functional.scaled_dot_product_attention(
                    query[:, :, start:end],
                    keys,
                    values,
                    attn_mask=causal_lower_right(block.queries, keys.shape[2]),
                    scale=scale,
                    enable_gqa=True,
                )
            )
    return torch.cat(out, dim=2)


class _BlockAttention(torch.autograd.Function):
    """Attention by blocks on a CPU.

    The backward pass of one block takes the output and the log-sum-exp over **all** keys, which
    makes its probabilities those of the whole. Causal blocks come first, and cover every token.
    """

    @staticmethod
    def forward(
        ctx: Any,
        blocks: Sequence[Block],
        scale: float,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *past: Tensor,
    ) -> Tensor:
        _, heads, tokens, size = query.shape
        exact = torch.promote_types(query.dtype, torch.float32)
        total = query.new_empty(1, tokens, heads, size, dtype=exact).transpose(1, 2)
        normaliser = query.new_empty(1, tokens, heads, dtype=exact).transpose(1, 2)
        groups = heads // key.shape[1]
        for block in blocks:
            k, v = (_keys(t, block) for t in _source(block, (key, value), past))
            for j in _rounds(block, groups):
                q, out, lse = (_queries(t, block, groups, j) for t in (query, total, normaliser))
                partial, part = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                    q, _repeated(k, q), _repeated(v, q), 0.0, block.causal, scale=scale
                )
                if block.causal:
                    out.copy_(partial)
                    lse.copy_(part)
                else:
                    out.lerp_(partial.to(exact), torch.sigmoid(part - lse)[..., None])
                    lse.copy_(torch.logaddexp(lse, part))
        result = total.to(query.dtype)
        ctx.blocks, ctx.scale, ctx.groups = blocks, scale, groups
        ctx.save_for_backward(query, key, value, result, normaliser, *past)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, result, normaliser, *past = ctx.saved_tensors
        to_query, to_key, to_value = (torch.empty_like(t) for t in (query, key, value))
        to_past = [torch.zeros_like(t) for t in past]
        for block in ctx.blocks:
            k, v = (_keys(t, block) for t in _source(block, (key, value), past))
            places = [_keys(t, block) for t in _source(block, (to_key, to_value), to_past)]
            for j in _rounds(block, ctx.groups):
                q, g, out, lse, place = (
                    _queries(t, block, ctx.groups, j)
                    for t in (query, grad, result, normaliser, to_query)
                )
                parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    *(g, q, _repeated(k, q), _repeated(v, q), out, lse, 0.0, block.causal),
                    scale=ctx.scale,
                )
                for target, part in zip((place, *places), parts, strict=True):
                    if block.causal and (target is place or j == 0):
                        target.copy_(part.sum_to_size(target.shape))
                    else:
                        target += part.sum_to_size(target.shape)
        return None, None, to_query, to_key, to_value, *to_past


def _source(
    block: Block, own: tuple[Tensor, Tensor], past: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    if block.level is None:
        return own
    return past[2 * block.level], past[2 * block.level + 1]


def _rounds(block: Block, groups: int) -> range:
    """Return a number for each call of the kernel.

    One query head of each group at a time where a batch holds nodes, else the groups are the batch:
    keys serve several query heads without a copy.
    """
    return range(groups if block.count > 1 else 1)


def _queries(whole: Tensor, block: Block, groups: int, j: int) -> Tensor:
    """Return a view of the block's queries, [batch, key heads, queries, ...]."""
    part = whole[0, :, block.query : block.query + block.count * block.queries]
    if block.count == 1:
        return part.view(-1, groups, *part.shape[1:]).transpose(0, 1)
    return _nodes(part[j::groups], block.count)


def _keys(whole: Tensor, block: Block) -> Tensor:
    """Return a view of the block's keys or values, [nodes, key heads, keys, size]."""
    return _nodes(whole[0, :, block.key : block.key + block.count * block.keys], block.count)


def _nodes(part: Tensor, count: int) -> Tensor:
    heads, tokens, *rest = part.shape
    return part.view(heads, count, tokens // count, *rest).transpose(0, 1)


def _repeated(keys: Tensor, queries: Tensor) -> Tensor:
    return keys.expand(queries.shape[0], -1, -1, -1)
