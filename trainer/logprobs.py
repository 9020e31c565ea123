"""Log-probabilities of trained tokens; the head runs only where a token is trained, in chunks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from trainer.packing import Items, Pass
from trainer.tree_attention import TreePass


def hidden_of(model: Any, work: Pass, tree: TreePass | None) -> Tensor:
    """Return the last hidden states [tokens, size] of a pass; ``tree`` is its attention."""
    # Right padding and causal attention: no trained token sees padding, so no mask is needed,
    # and sdpa takes its causal path instead of a dense [seq_len, seq_len] one.
    shape: dict[str, Any] = {}
    if tree is not None:
        # transformers makes no mask where it gets one of four dimensions; the tree needs none.
        none = work.ids.new_ones(1, 1, 1, 1, dtype=torch.bool)
        shape = {"position_ids": work.depths, "attention_mask": none, "tree": tree}
    out = model.base_model(input_ids=work.ids, use_cache=False, **shape)
    hidden: Tensor = out.last_hidden_state.flatten(0, 1)
    return hidden


def logprobs_of(
    model: Any, hidden: Tensor, items: Items, head_chunk: int, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Return ``log_softmax(logits / T)`` [n] of the items, and the entropies, which have a gradient
    only on request.

    The head runs once for each token and temperature that predict something, on ``head_chunk`` of
    them at a time, and again in the backward pass.
    """
    if not len(items):
        empty = hidden.new_zeros(0)
        return empty, empty
    pairs = torch.stack([items.sources.double(), items.temperatures.double()])
    (sources, temperatures), owners = torch.unique(pairs, dim=1, return_inverse=True)
    owners, order = owners.sort(stable=True)
    selected = hidden[sources.long()]
    head = model.get_output_embeddings()
    logprobs, entropies = [], []
    starts = torch.arange(0, len(sources) + head_chunk, head_chunk, device=owners.device)
    ends = torch.searchsorted(owners, starts).tolist()
    for first, start, end in zip(starts.tolist(), ends, ends[1:], strict=False):
        edges = slice(first, first + head_chunk)
        arguments = (
            *(selected[edges], head.weight, getattr(head, "bias", None), temperatures[edges]),
            *(items.labels[order[start:end]], owners[start:end] - first, entropy_gradient),
        )
        if torch.is_grad_enabled():
            lp, ent = checkpoint(
                _label_logprobs, *arguments, use_reentrant=False, preserve_rng_state=False
            )
        else:
            lp, ent = _label_logprobs(*arguments)
        logprobs.append(lp)
        entropies.append(ent)
    back = order.argsort()
    return torch.cat(logprobs)[back], torch.cat(entropies)[back]


def pass_logprobs(
    model: Any,
    work: Pass,
    tree: TreePass | None,
    head_chunk: int,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return what :func:`logprobs_of` does, from the pass's tokens on."""
    hidden = hidden_of(model, work, tree)
    return logprobs_of(model, hidden, work.items, head_chunk, entropy_gradient)


def _label_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperatures: Tensor,
    labels: Tensor,
    owners: Tensor,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Return the labels' log-softmax(logits / T) [n], and the entropies.

    ``hidden`` and ``temperatures`` belong to the tokens that predict, ``owners`` gives the number
    of each label's.
    """
    logits = functional.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits / temperatures.to(logits.dtype)[:, None]
    normaliser = logits.logsumexp(-1)
    logprobs = logits[owners, labels] - normaliser[owners]
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropies = normaliser - (logits.softmax(-1) * logits).sum(-1)
    return logprobs, entropies[owners]
