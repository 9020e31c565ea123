"""Log-probabilities of trained tokens by a transformers model, without logits of all tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from trainer.packing import TrainedTokens


def logprobs_of(
    model: Any,
    ids: Tensor,
    tokens: TrainedTokens,
    temperatures: Tensor,
    entropy: bool,
    head_chunk: int,
) -> tuple[Tensor, Tensor | None]:
    """``log_softmax(logits / T)`` [n] of the trained tokens, and if asked, the entropies.

    ``ids`` is int64 [batch, seq_len], padded on the right; ``temperatures`` [n]. The head runs on
    ``head_chunk`` tokens at a time, and again in the backward pass.
    """
    # Right padding and causal attention: no trained token sees padding, so no mask is needed,
    # and sdpa takes its causal path instead of a dense [seq_len, seq_len] one.
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    selected = hidden[tokens.rows, tokens.sources]
    head = model.get_output_embeddings()
    logprobs, entropies = [], []
    parts = (selected, tokens.labels, temperatures)
    for h, labels, t in zip(*(torch.split(part, head_chunk) for part in parts), strict=True):
        arguments = (h, head.weight, getattr(head, "bias", None), labels, t, entropy)
        if torch.is_grad_enabled():
            lp, ent = checkpoint(
                _label_logprobs, *arguments, use_reentrant=False, preserve_rng_state=False
            )
        else:
            lp, ent = _label_logprobs(*arguments)
        logprobs.append(lp)
        entropies.append(ent)
    if not len(tokens):
        empty = selected.new_zeros(0)
        return empty, empty if entropy else None
    return torch.cat(logprobs), torch.cat(entropies) if entropy else None


def _label_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    temperatures: Tensor,
    entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """One chunk: log-softmax(logits / T) [n] of the labels, and the distributions' entropies."""
    logits = functional.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits / temperatures.to(logits.dtype)[:, None]
    normaliser = logits.logsumexp(-1)
    logprobs = logits.gather(-1, labels[:, None])[:, 0] - normaliser
    if not entropy:
        return logprobs, None
    with torch.no_grad():
        entropies = normaliser - (logits.softmax(-1) * logits).sum(-1)
    return logprobs, entropies
