"""The optimizer updates of one train step: minibatches, their inputs, and how they are undone."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from trainer.loss import (
    LossConfig,
    LossInputs,
    clipped_log_ratio,
    importance_weight,
    is_rejected,
)
from trainer.packing import Pass, Shape, dealt, tie
from trainer.rows import Row, at_trained, count_trained, trained_positions, with_values
from trainer.world import World, gathered, local_part

ReferenceLogprobs: TypeAlias = Callable[[Sequence[Pass]], list[Tensor]]
"""A function that returns another model's log-probabilities of the passes' items, [n] each, without
gradient. All processes of a world call it together."""

_MAX_LOG_PRODUCT = 20.0
_ROUNDING = 100.0
"""Entropies of the same distribution differ by less than this many units of their last digit."""


@dataclass(frozen=True, slots=True)
class Minibatch:
    """The rows of one optimizer update."""

    rows: Sequence[Row]
    """This process's."""
    tokens: int
    """N: the trained tokens of all processes' rows."""
    shapes: Sequence[Shape] = ()
    """The shapes of all processes' passes, where there are several."""


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
    for parts in (1, 2):  # the group alone, then with the session
        units = defaultdict(list)
        for k, owner in enumerate(owners):
            units[owner[:parts]].append(k)
        if len(units) >= count:
            break
    ordered = sorted(units.values(), key=lambda unit: sorted(_content(rows[k]) for k in unit))
    weights = [count_trained([rows[k] for k in unit]) for unit in ordered]
    shares = dealt(weights, max(min(count, len(ordered)), 1))
    return [sorted(k for unit in share for k in ordered[unit]) for share in shares]


def _content(row: Row) -> tuple[bytes, bytes, bytes]:
    return row["input_ids"].numpy().tobytes(), row["loss_mask"].numpy().tobytes(), tie(row)


def with_sequence_means(
    rows: Sequence[Row], name: str, logprobs: Sequence[Tensor], base: str
) -> list[Row]:
    """Return the rows with the mean of ``logprobs - base`` over their trained tokens.

    ``base`` is an input of the loss.
    """
    pairs = zip(rows, logprobs, strict=True)
    return _with_means(rows, name, [v - row[base][row["loss_mask"].bool()] for row, v in pairs])


def with_rejections(
    rows: Sequence[Row], proximal: Sequence[Tensor], config: LossConfig
) -> list[Row]:
    """Return the rows with 1 where the row is rejected, from log pi_prox of its trained tokens, and
    0 elsewhere."""
    out = []
    for row, values in zip(rows, proximal, strict=True):
        log_ratios = values - row["logprobs"][row["loss_mask"].bool()]
        gone = len(values) > 0 and is_rejected(log_ratios, config)
        out.append(row | {"rejected": values.new_tensor(float(gone))})
    return out


def with_clipped_ratios(
    rows: Sequence[Row], logprobs: Sequence[Tensor], config: LossConfig
) -> list[Row]:
    """Return the rows with the mean over their trained tokens of the clipped log ratio of
    ``logprobs``, which are those of pi_theta."""
    clipped = []
    for row, values in zip(rows, logprobs, strict=True):
        inputs = LossInputs.of(at_trained(row, trained_positions(row)))
        proximal = values if inputs.proximal is None else inputs.proximal
        clipped.append(clipped_log_ratio(values, proximal, inputs.advantages, config))
    return _with_means(rows, "sequence_clipped_ratio", clipped)


def _with_means(rows: Sequence[Row], name: str, values: Sequence[Tensor]) -> list[Row]:
    """Return the rows with the mean of each one's values, 0 where it has none."""
    return [
        row | {name: (of_row.double().sum() / max(len(of_row), 1)).to(of_row.dtype)}
        for row, of_row in zip(rows, values, strict=True)
    ]


def with_sequence_products(
    rows: Sequence[Row], logprobs: Sequence[Tensor], config: LossConfig
) -> list[Row]:
    """Return the rows with the product over their trained tokens of pi_theta / pi_prox, pi_theta
    being that of ``logprobs``, and the importance weight; e**20 at most."""
    out = []
    for row, values in zip(rows, logprobs, strict=True):
        inputs = LossInputs.of(at_trained(row, trained_positions(row)))
        proximal = values if inputs.proximal is None else inputs.proximal
        weight, _ = importance_weight(proximal, inputs, config)
        total = (values - proximal + weight.log()).double().sum()
        product = total.clamp(max=_MAX_LOG_PRODUCT).exp()
        out.append(row | {"sequence_product": product.to(values.dtype)})
    return out


def with_outliers(
    rows: Sequence[Row], logprobs: Sequence[Tensor], bound: float, world: World | None
) -> list[Row]:
    """Return the rows with the tokens marked that are left out so that the mean of
    ``(log pi_theta - log mu) ** 2`` over all processes' other tokens is ``bound`` at most: those
    with the largest squares, as few as possible. ``logprobs`` are those of pi_theta. All processes
    of a world must call it together.

    Equal squares are left out together, and so are those that differ by the rounding of float32
    alone: it differs with the pack.

    Source: Second-Moment Trust Policy Optimization (arXiv 2510.01161).
    """
    squares = [
        (values - row["logprobs"][row["loss_mask"].bool()]).double().square()
        for row, values in zip(rows, logprobs, strict=True)
    ]
    mine = torch.cat([torch.zeros(0).double(), *squares])
    every = np.sort((mine if world is None else gathered(mine, world)).numpy())
    if not rows:
        return []
    means = np.cumsum(every) / np.arange(1, len(every) + 1)
    # The means grow with the squares, so the first one beyond the bound ends those that stay.
    count = int(np.searchsorted(means, bound, side="right"))
    least = float(every[count]) if count < len(every) else math.inf
    least *= 1 - _ROUNDING * torch.finfo(logprobs[0].dtype).eps
    return with_values(
        rows, "outlier", [(s >= least).to(v.dtype) for s, v in zip(squares, logprobs, strict=True)]
    )


def with_high_entropies(
    rows: Sequence[Row], entropies: Sequence[Tensor], share: float, world: World | None
) -> list[Row]:
    """Return the rows with the choice of the ``share`` of all processes' tokens with the highest
    entropies, by their quantile. All processes of a world must call it together.

    Tokens after the same context have the same entropy but for rounding, which differs with the
    pack: what is below the quantile by the rounding of float32 alone is chosen with it.

    Source: Beyond the 80/20 Rule (arXiv 2506.01939).
    """
    mine = torch.cat([torch.zeros(0).double(), *(one.double() for one in entropies)])
    every = mine if world is None else gathered(mine, world)
    if not rows:
        return []
    least = float(np.quantile(every.numpy(), 1 - share))
    least -= _ROUNDING * torch.finfo(entropies[0].dtype).eps * (1 + abs(least))
    return with_values(rows, "high_entropy", [(e >= least).to(e.dtype) for e in entropies])


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
