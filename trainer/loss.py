"""Log-probabilities of trained tokens, and losses by name. GRPO's is the clipped policy loss:

``L = -(1/N) sum_t w_t * min(rho_t A_t, clip(rho_t, 1 - eps_low, 1 + eps_high) A_t)`` with
``rho = pi_theta / pi_prox`` and ``w = stop_grad(min(pi_prox / mu, C))``: PPO's clip
(arXiv 1707.06347) around a proximal policy that differs from the behaviour policy mu
(decoupled PPO, arXiv 2110.00641), asymmetric (DAPO, arXiv 2503.14476), truncated
importance weights for the differences between engine and trainer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from any_agent.errors import ConfigError
from any_agent.runtime.import_string import NamedRegistry
from trainer.packing import Items, Pass
from trainer.tree_attention import TreePass

_LOG_RATIO_LIMIT = 20.0
"""The bound of a log ratio in the mismatch gauge, so that one token cannot make it infinite."""


@dataclass(frozen=True, slots=True)
class LossConfig:
    """The loss by its registered or dotted name, and its constants.

    ``eps_low`` and ``eps_high`` are the clip's distances from 1, ``is_cap`` is C.
    """

    name: str = "grpo"
    eps_low: float = 0.2
    eps_high: float = 0.28
    is_cap: float = 5.0
    kl_coef: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.eps_low <= 1 or self.eps_high < 0:
            raise ConfigError("eps_low must lie in [0, 1] and eps_high must not be negative")
        if self.is_cap <= 0:
            raise ConfigError("is_cap must be positive")


@dataclass(slots=True)
class LossStats:
    """Sums over trained tokens, so that micro-batches and ranks add up exactly.

    :meth:`means` gives the means. ``entropy`` is nan where the loss was given none. The policy
    fills the counts of the passes' tokens.
    """

    tokens: int = 0
    tokens_computed: int = 0
    """Tokens that went through the model, padding included."""
    tokens_in_rows: int = 0
    """Tokens of the rows: those that went through it if each row was computed alone."""
    loss: float = 0.0
    """The loss, already divided by N: the parts of one batch add up to its loss."""
    ratio: float = 0.0
    clipped_low: float = 0.0
    clipped_high: float = 0.0
    weight: float = 0.0
    is_capped: float = 0.0
    mismatch: float = 0.0
    mismatch_max: float = 0.0
    """The largest difference of a token's log-probabilities in engine and trainer, not a sum."""
    entropy: float = 0.0

    def __add__(self, other: LossStats) -> LossStats:
        pairs = ((f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return LossStats(*(max(a, b) if n == "mismatch_max" else a + b for n, a, b in pairs))

    def means(self) -> dict[str, float]:
        """Return the loss, counts and the maximum as they are, everything else per trained token.

        ``mismatch`` is ``E[r - log r - 1]``, r = pi_prox / mu: how far the engine's
        log-probabilities are from the trainer's (an estimate of their KL divergence, nats).
        """
        n = max(self.tokens, 1)
        counts = ("tokens", "tokens_computed", "tokens_in_rows", "loss", "mismatch_max")
        whole = {name: float(getattr(self, name)) for name in counts}
        rest = (f.name for f in fields(self) if f.name not in whole)
        return whole | {name: getattr(self, name) / n for name in rest}


class Loss(Protocol):
    """A loss function; :func:`policy_loss` describes its arguments and results."""

    def __call__(
        self,
        logprobs: Tensor,
        behaviour: Tensor,
        advantages: Tensor,
        *,
        total_tokens: int,
        config: LossConfig,
        entropies: Tensor | None = None,
        place: Callable[[int], str] = ...,
    ) -> tuple[Tensor, LossStats]: ...


LOSSES: NamedRegistry[Loss] = NamedRegistry("loss", "train.loss")


def register_loss(name: str) -> Callable[[Loss], Loss]:
    """Decorate a loss, so that `train.loss` can name it in this process."""
    return lambda loss: LOSSES.register(name, loss)


def policy_loss(
    logprobs: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    *,
    total_tokens: int,
    config: LossConfig,
    proximal: Tensor | None = None,
    entropies: Tensor | None = None,
    place: Callable[[int], str] = "trained token {}".format,
    **_: Any,
) -> tuple[Tensor, LossStats]:
    """Return the loss's share of these tokens, a scalar to call ``backward`` on, and statistics.

    All tensors are float, shape [n], one entry per trained token, natural logarithms:
    ``logprobs`` of pi_theta (with gradient), ``behaviour`` of mu as recorded, ``proximal`` of
    pi_prox (default: ``logprobs`` without gradient, right for one optimizer step per batch).
    ``total_tokens`` is N, the trained tokens of **all** micro-batches and ranks: the shares must be
    summed, over ranks too.

    Raises ValueError for shapes that do not match, FloatingPointError with the token's ``place``
    where an input, or the loss of a token, is not finite.
    """
    if total_tokens < max(1, logprobs.numel()):
        raise ValueError(f"N = {total_tokens} is less than the {logprobs.numel()} tokens given")
    given = {
        "log-probability": logprobs,
        "behaviour log-probability": behaviour,
        "advantage": advantages,
        "proximal log-probability": proximal,
    }
    for name, values in given.items():
        if values is not None:
            if values.shape != logprobs.shape:
                raise ValueError(f"{name}: shape {tuple(values.shape)} is not that of logprobs")
            _require_finite(name, values, place)

    fixed = logprobs.detach() if proximal is None else proximal.detach()
    ratio = torch.exp(logprobs - fixed)
    _require_finite("ratio", ratio, place)
    clipped = ratio.clamp(1 - config.eps_low, 1 + config.eps_high)
    raw_weight = torch.exp(fixed - behaviour)
    weight = raw_weight.clamp(max=config.is_cap)
    per_token = -weight * torch.min(ratio * advantages, clipped * advantages)
    _require_finite("loss", per_token, place)
    loss = per_token.sum() / total_tokens

    with torch.no_grad():
        log_r = (fixed - behaviour).clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
        low = (ratio < 1 - config.eps_low) & (advantages < 0)
        high = (ratio > 1 + config.eps_high) & (advantages > 0)
        stats = LossStats(
            tokens=logprobs.numel(),
            loss=float(loss.detach()),
            ratio=float(ratio.sum()),
            clipped_low=float(low.sum()),
            clipped_high=float(high.sum()),
            weight=float(weight.sum()),
            is_capped=float((raw_weight > config.is_cap).sum()),
            mismatch=float((torch.exp(log_r) - log_r - 1).sum()),
            mismatch_max=float((fixed - behaviour).abs().max()) if logprobs.numel() else 0.0,
            entropy=float("nan") if entropies is None else float(entropies.sum()),
        )
    return loss, stats


LOSSES.register("grpo", policy_loss)


def _require_finite(name: str, values: Tensor, place: Callable[[int], str]) -> None:
    values = values.detach()
    bad = ~torch.isfinite(values)
    if bool(bad.any()):
        k = int(bad.nonzero()[0])
        count = int(bad.sum())
        raise FloatingPointError(
            f"the {name} at {place(k)} is {float(values[k])} ({count} of {values.numel()} tokens)"
        )


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


def logprobs_of(model: Any, hidden: Tensor, items: Items, head_chunk: int) -> tuple[Tensor, Tensor]:
    """Return ``log_softmax(logits / T)`` [n] of the items, and the entropies.

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
            *(items.labels[order[start:end]], owners[start:end] - first),
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
    model: Any, work: Pass, tree: TreePass | None, head_chunk: int
) -> tuple[Tensor, Tensor]:
    """Return what :func:`logprobs_of` does, from the pass's tokens on."""
    return logprobs_of(model, hidden_of(model, work, tree), work.items, head_chunk)


def _label_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperatures: Tensor,
    labels: Tensor,
    owners: Tensor,
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
    with torch.no_grad():
        entropies = normaliser - (logits.softmax(-1) * logits).sum(-1)
    return logprobs, entropies[owners]


FURTHER_INPUTS = ("proximal", "reference", "sequence_log_ratio", "sequence_log_weight")


def needs_sequence_ratio(config: LossConfig) -> bool:
    """Return True if the loss uses each row's mean log ratio of pi_theta and pi_prox."""
    return False


def needs_sequence_weight(config: LossConfig) -> bool:
    """Return True if the loss uses each row's mean log ratio of pi_prox and mu."""
    return False
