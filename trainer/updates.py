"""The optimizer updates of one train step: minibatches, their inputs, and how they are undone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from trainer.loss import LossConfig, LossInputs, importance_weight
from trainer.packing import Pass, dealt, tie
from trainer.rows import Row, count_trained
from trainer.world import World, gathered, local_part

Minibatch: TypeAlias = tuple[Sequence[Pass], int]
"""The passes of one optimizer update on this process, and N: the number of trained tokens of all
its passes on all processes."""
ReferenceLogprobs: TypeAlias = Callable[[Sequence[Pass]], list[Tensor]]
"""A function that returns another model's log-probabilities of the passes' items, [n] each, without
gradient. All processes of a world call it together."""

_MAX_LOG_PRODUCT = 20.0
_ROUNDING = 100.0
"""Entropies of the same distribution differ by less than this many units of their last digit."""


@dataclass(frozen=True, slots=True)
class StepConfig:
    """The settings of one train step; None: the optimizer's, or policy's, own."""

    epochs: int = 1
    """The updates that each minibatch is used for."""
    lr: float | None = None
    betas: tuple[float, float] | None = None
    weight_decay: float | None = None
    grad_clip: float | None = None


def divide(rows: Sequence[Row], owners: Sequence[tuple[int, str]], count: int) -> list[list[int]]:
    """Divide a batch into ``count`` minibatches of about as many trained tokens.

    ``owners`` has each row's group and session. Groups stay whole; where there are fewer than
    ``count``, sessions do, and there are never more minibatches than sessions. Returns the numbers
    of each one's rows. The same rows in any order are divided alike.
    """
    if count == 1:
        return [list(range(len(rows)))]
    units: dict[object, list[int]] = {}
    for unit_of in (_group, _session):
        units = defaultdict(list)
        for k, owner in enumerate(owners):
            units[unit_of(owner)].append(k)
        if len(units) >= count:
            break
    ordered = sorted(units.values(), key=lambda unit: sorted(_content(rows[k]) for k in unit))
    weights = [count_trained([rows[k] for k in unit]) for unit in ordered]
    shares = dealt(weights, max(min(count, len(ordered)), 1))
    return [sorted(k for unit in share for k in ordered[unit]) for share in shares]


def _group(owner: tuple[int, str]) -> int:
    return owner[0]


def _session(owner: tuple[int, str]) -> tuple[int, str]:
    return owner


def _content(row: Row) -> tuple[bytes, bytes, bytes]:
    return row["input_ids"].numpy().tobytes(), row["loss_mask"].numpy().tobytes(), tie(row)


def with_input(passes: Sequence[Pass], name: str, values: Sequence[Tensor]) -> list[Pass]:
    """Return the passes with one more input of the loss, [n] for each; idle ones get none."""
    return [
        replace(one, items=replace(one.items, inputs=one.items.inputs | {name: value}))
        if one.items.inputs
        else one
        for one, value in zip(passes, values, strict=True)
    ]


def with_sequence_means(
    passes: Sequence[Pass], name: str, logprobs: Sequence[Tensor], base: str
) -> list[Pass]:
    """Return the passes with the mean of ``logprobs - base`` over each row's trained tokens.

    ``base`` is an input of the loss.
    """
    differences = [
        values - one.items.inputs[base] if one.items.inputs else values
        for one, values in zip(passes, logprobs, strict=True)
    ]
    sums, counts = _of_rows(passes, differences)
    return _spread(passes, name, sums / counts.clamp(min=1), logprobs)


def with_sequence_products(
    passes: Sequence[Pass], logprobs: Sequence[Tensor], config: LossConfig
) -> list[Pass]:
    """Return the passes with the product over each row's trained tokens of pi_theta / pi_prox,
    pi_theta being that of ``logprobs``, and the importance weight; e**20 at most."""
    parts = []
    for one, values in zip(passes, logprobs, strict=True):
        if one.items.inputs:
            inputs = LossInputs.of(one.items.inputs)
            proximal = values if inputs.proximal is None else inputs.proximal
            weight, _ = importance_weight(proximal, inputs, config)
            values = values - proximal + weight.log()
        parts.append(values)
    sums, _ = _of_rows(passes, parts)
    products = sums.clamp(max=_MAX_LOG_PRODUCT).exp()
    return _spread(passes, "sequence_product", products, logprobs)


def with_high_entropies(
    passes: Sequence[Pass], entropies: Sequence[Tensor], share: float, world: World | None
) -> list[Pass]:
    """Return the passes with the choice of the ``share`` of all processes' tokens with the highest
    entropies, by their quantile. All processes of a world must call it together.

    Tokens after the same context have the same entropy but for rounding, which differs with the
    pack: what is below the quantile by the rounding of float32 alone is chosen with it.

    Source: Beyond the 80/20 Rule (arXiv 2506.01939).
    """
    pairs = zip(passes, entropies, strict=True)
    # Of one type in all processes, also in one whose passes are only there for the others' sake.
    none = entropies[0].new_zeros(0)
    mine = torch.cat([none, *(e for one, e in pairs if one.items.inputs)])
    every = mine if world is None else gathered(mine, world)
    least = float(np.quantile(every.numpy(), 1 - share)) if len(every) else 0.0
    least -= _ROUNDING * torch.finfo(every.dtype).eps * (1 + abs(least))
    return with_input(passes, "high_entropy", [(e >= least).to(e.dtype) for e in entropies])


def _of_rows(passes: Sequence[Pass], values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the sum of the values of each row's trained tokens, and their number; float64.

    A row's tokens may lie in several passes.
    """
    sequences, parts = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0).double()]
    for one, part in zip(passes, values, strict=True):
        if one.items.inputs:
            sequences.append(one.items.sequences)
            parts.append(part.double())
    owners = torch.cat(sequences)
    counts = owners.bincount()
    return torch.zeros(len(counts)).double().index_add(0, owners, torch.cat(parts)), counts


def _spread(
    passes: Sequence[Pass], name: str, of_rows: Tensor, like: Sequence[Tensor]
) -> list[Pass]:
    """Return the passes with an input of the loss that all tokens of a row share."""
    values = [
        of_rows[one.items.sequences].to(other) if one.items.inputs else other
        for one, other in zip(passes, like, strict=True)
    ]
    return with_input(passes, name, values)


class Snapshot:
    """A copy of an optimizer's parameters and state, in the machine's memory."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters = [
            (p, _copy(p), {key: _copy(t) for key, t in optimizer.state.get(p, {}).items()})
            for group in optimizer.param_groups
            for p in group["params"]
        ]

    def restore(self) -> None:
        """Make parameters and state what they were, bit for bit."""
        with torch.no_grad():
            for parameter, value, state in self._parameters:
                local_part(parameter).copy_(value)
                if not state:
                    self._optimizer.state.pop(parameter, None)
                for key, kept in state.items():
                    local_part(self._optimizer.state[parameter][key]).copy_(kept)


def _copy(tensor: Tensor) -> Tensor:
    return local_part(tensor.detach()).to("cpu", copy=True)
