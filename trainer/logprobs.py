"""Log-probabilities of trained tokens; the head runs only where a token is trained, in chunks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from trainer.compiling import compiled, reason_of
from trainer.packing import Pass
from trainer.tree_attention import TreePass


def hidden_of(model: Any, work: Pass, tree: TreePass | None) -> Tensor:
    """Return the last hidden states [rows, tokens, size] of a pass; ``tree`` is its attention."""
    # Right padding and causal attention: no trained token sees padding, so no mask is needed,
    # and sdpa takes its causal path instead of a dense [seq_len, seq_len] one.
    shape: dict[str, Any] = {}
    if tree is not None:
        # transformers makes no mask where it gets one of four dimensions; the tree needs none.
        none = work.ids.new_ones(1, 1, 1, 1, dtype=torch.bool)
        shape = {"position_ids": work.depths, "attention_mask": none, "tree": tree}
    out = model.base_model(input_ids=work.ids, use_cache=False, **shape)
    hidden: Tensor = out.last_hidden_state
    return hidden


class Taught(NamedTuple):
    """The hidden states and the head of a teacher's distributions, without gradient."""

    hidden: Tensor
    """Its last hidden states: those of a pass, [rows, tokens, size], or of the tokens of a chunk,
    [n, size]."""
    weight: Tensor
    """Its output head, whole."""
    bias: Tensor | None
    forward: bool
    """The divergence is KL(teacher, policy), not KL(policy, teacher)."""


def logprobs_of(
    model: Any,
    hidden: Tensor | None,
    work: Pass,
    tree: TreePass | None,
    head_chunk: int,
    fused: bool,
    entropy_gradient: bool,
    taught: Taught | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return ``log_softmax(logits / T)`` [n] of a pass's items, the entropies, which have a
    gradient only on request, and the divergences from the teacher, None without one.

    The head runs once for each token and temperature that predict something, on ``head_chunk`` of
    them at a time, and again in the backward pass. ``fused``: what follows the head is compiled.
    ``hidden`` is the result of :func:`hidden_of`; None: it is still to be computed.
    """
    items = work.items
    if hidden is None:
        hidden = hidden_of(model, work, tree)
    if not len(items):
        empty = hidden.new_zeros(0)
        return empty, empty, None if taught is None else empty
    pairs = torch.stack([items.sources.double(), items.temperatures.double()])
    (sources, temperatures), owners = torch.unique(pairs, dim=1, return_inverse=True)
    owners, order = owners.sort(stable=True)
    selected = hidden.flatten(0, 1)[sources.long()]
    if taught is not None:
        taught = taught._replace(hidden=taught.hidden.flatten(0, 1)[sources.long()])
    head = model.get_output_embeddings()
    logprobs, entropies, divergences = [], [], []
    starts = torch.arange(0, len(sources) + head_chunk, head_chunk, device=owners.device)
    ends = torch.searchsorted(owners, starts).tolist()
    for first, start, end in zip(starts.tolist(), ends, ends[1:], strict=False):
        edges = slice(first, first + head_chunk)
        arguments = (
            *(selected[edges], head.weight, getattr(head, "bias", None), temperatures[edges]),
            *(items.labels[order[start:end]], owners[start:end] - first),
            *(fused, entropy_gradient),
            None if taught is None else taught._replace(hidden=taught.hidden[edges]),
        )
        lp, ent, div = label_logprobs(*arguments)
        logprobs.append(lp)
        entropies.append(ent)
        divergences.append(div)
    back = order.argsort()
    found = None if taught is None else torch.cat(divergences)[back]
    return torch.cat(logprobs)[back], torch.cat(entropies)[back], found


def try_fused(tokens: int, vocabulary: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Compile what follows the head, for these logits; None, or the reason why that fails."""
    ones = partial(torch.ones, dtype=dtype, device=device)
    hidden, weight = (ones(n, 1, requires_grad=True) for n in (tokens, vocabulary))
    numbers = torch.arange(tokens, device=device)
    try:
        given = (torch.ones_like(numbers, dtype=torch.float32), numbers % vocabulary, numbers)
        logprobs, *_ = label_logprobs(hidden, weight, None, *given, True, False, None)
        torch.autograd.backward(logprobs.sum())
    except Exception as error:
        return f"torch.compile does not work here ({reason_of(error)})"
    return None


class _LabelLogprobs(torch.autograd.Function):
    """The labels' log-softmax(logits / T) [n], the entropies, and the divergences from a teacher.

    ``hidden`` and ``temperatures`` belong to the tokens that predict, ``owners`` gives the number
    of each label's. No logits are kept for the backward pass: that makes them again, and turns them
    into their gradient in place.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperatures: Tensor,
        labels: Tensor,
        owners: Tensor,
        fused: bool,
        entropy_gradient: bool,
        taught: Taught | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        logits = functional.linear(hidden, weight, bias)
        divergences = None
        if taught is not None:
            chosen = compiled_once(_divergences) if fused else _divergences
            divergences = chosen(logits, _logits_of(taught), temperatures, taught.forward)
        chosen = compiled_once(_normalised) if fused else _normalised
        logprobs, entropies, normaliser = chosen(logits, temperatures, labels, owners)
        ctx.save_for_backward(
            *(hidden, weight, bias, temperatures, labels, owners, normaliser, entropies),
            divergences,
        )
        ctx.fused, ctx.entropy_gradient, ctx.taught = fused, entropy_gradient, taught
        out = entropies[owners]
        if not entropy_gradient:
            ctx.mark_non_differentiable(out)
        return logprobs, out, None if divergences is None else divergences[owners]

    @staticmethod
    def backward(ctx: Any, *of_outputs: Tensor) -> tuple[Tensor | None, ...]:
        of_logprobs, of_entropies, of_divergences = of_outputs
        *saved, divergences = ctx.saved_tensors
        hidden, weight, bias, temperatures, labels, owners, normaliser, entropies = saved
        by_token = _summed(normaliser, owners, of_logprobs)
        of_entropy = _summed(normaliser, owners, of_entropies) if ctx.entropy_gradient else None
        logits = functional.linear(hidden, weight, bias)
        more = None
        if ctx.taught is not None:
            by_divergence = _summed(normaliser, owners, of_divergences)
            chosen = compiled_once(_by_divergences) if ctx.fused else _by_divergences
            given = (logits, _logits_of(ctx.taught), temperatures, divergences, by_divergence)
            more = chosen(*given, ctx.taught.forward)
        chosen = compiled_once(_by_all) if ctx.fused else _by_all
        by_z = chosen(logits, temperatures, normaliser, entropies, by_token, of_entropy)
        if more is not None:
            by_z += more
        by_z.index_put_((owners, labels), of_logprobs, accumulate=True)
        chosen = compiled_once(_by_logits) if ctx.fused else _by_logits
        by_logits = chosen(by_z, temperatures, hidden.dtype)
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        return (
            by_logits @ weight if needs_hidden else None,
            by_logits.T @ hidden if needs_weight else None,
            by_logits.sum(0) if needs_bias else None,
            *(None,) * 6,
        )


label_logprobs: Callable[..., tuple[Tensor, Tensor, Any]] = _LabelLogprobs.apply


def _logits_of(taught: Taught) -> Tensor:
    return functional.linear(taught.hidden, taught.weight, taught.bias)


def _summed(like: Tensor, owners: Tensor, values: Tensor) -> Tensor:
    """Return the sums of values by owner, added in a fixed order on any device."""
    return torch.zeros_like(like).index_put_((owners,), values, accumulate=True)


@cache
def compiled_once(function: Callable[..., Any]) -> Callable[..., Any]:
    return compiled(function, dynamic=True)


def _normalised(
    logits: Tensor, temperatures: Tensor, labels: Tensor, owners: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the labels' log-probabilities, and each token's entropy and log of the normaliser."""
    z = _scaled(logits, temperatures)
    greatest = z.amax(-1, keepdim=True)
    # One exponential for both the normaliser and the entropy: it costs more than the rest.
    shifted = z.sub_(greatest)
    terms = shifted.exp()
    total = terms.sum(-1)
    log_total = total.log()
    logprobs = shifted[owners, labels] - log_total[owners]
    entropies = log_total - terms.mul_(shifted).sum(-1) / total
    return logprobs, entropies, greatest[:, 0] + log_total


def _divergences(logits: Tensor, of_teacher: Tensor, temperatures: Tensor, forward: bool) -> Tensor:
    """Return the divergence of each token's two distributions, from both models' logits."""
    ours, theirs = (_log_softmax(each, temperatures) for each in (logits, of_teacher))
    if forward:
        return (theirs.exp() * (theirs - ours)).sum(-1)
    return (ours.exp() * (ours - theirs)).sum(-1)


def _by_divergences(
    logits: Tensor,
    of_teacher: Tensor,
    temperatures: Tensor,
    divergences: Tensor,
    by_divergence: Tensor,
    forward: bool,
) -> Tensor:
    """Return the gradient of the divergences D by z = logits / T."""
    # With p = softmax(z) and the teacher's q: that of KL(q, p) is p - q, and that of KL(p, q) is
    # p * (log p - log q - D).
    ours, theirs = (_log_softmax(each, temperatures) for each in (logits, of_teacher))
    if forward:
        return (ours.exp() - theirs.exp()) * by_divergence[:, None]
    return ours.exp() * (ours - theirs - divergences[:, None]) * by_divergence[:, None]


def _log_softmax(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Return log-softmax(logits / T), which leaves the logits as they are."""
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return functional.log_softmax(exact / temperatures.to(exact.dtype)[:, None], -1)


def _by_all(
    logits: Tensor,
    temperatures: Tensor,
    normaliser: Tensor,
    entropies: Tensor,
    by_token: Tensor,
    of_entropy: Tensor | None,
) -> Tensor:
    """Return the gradient by z = logits / T, but for the labels' own parts."""
    # p = softmax(z). A log-probability's gradient by z is its label's unit vector - p; an
    # entropy's is -p * (log p + H).
    p = _scaled(logits, temperatures).sub_(normaliser[:, None]).exp_()
    if of_entropy is None:
        return p.mul_(-by_token[:, None])
    low = torch.special.xlogy(p, p).mul_(of_entropy[:, None])
    return p.mul_(-(by_token + of_entropy * entropies)[:, None]).sub_(low)


def _by_logits(by_z: Tensor, temperatures: Tensor, dtype: torch.dtype) -> Tensor:
    return by_z.div_(temperatures.to(by_z.dtype)[:, None]).to(dtype)


def _scaled(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Return logits / T, at least in float32."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.div_(temperatures.to(logits.dtype)[:, None])
