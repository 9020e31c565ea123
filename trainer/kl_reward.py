"""A divergence from the reference model in the reward of each output.

The divergence at a token is `log mu - log pi_ref`, mu as recorded: the estimate k1 for the policy
that sampled the token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeAlias

from torch import Tensor

from any_agent.errors import TrainingError
from trainer.advantage import SessionRewards
from trainer.rows import Row

Place: TypeAlias = tuple[int, int, int]
"""The numbers of an interaction's group, of its session in it, and its own."""
Divergences: TypeAlias = dict[Place, Tensor]
"""The divergence at each of an interaction's tokens, [n] float64."""


def found_divergences(
    places: Iterable[tuple[Place, Row]], reference: Callable[[Sequence[Row]], Sequence[Tensor]]
) -> Divergences:
    """Return the divergences of these rows, whose trained tokens are an interaction's output.

    ``reference`` returns the reference model's log-probabilities of rows' trained tokens. Raises
    TrainingError where one is not finite.
    """
    given = list(places)
    found = reference([row for _, row in given])
    if not all(bool(values.isfinite().all()) for values in found):
        raise TrainingError(
            "a log-probability of the reference model is not finite: check train.reference_model"
        )
    # A recorded one that is not finite has its error in the loss, which names the token.
    return {
        place: (row["logprobs"][row["loss_mask"].bool()].double() - values).nan_to_num(0, 0, 0)
        for (place, row), values in zip(given, found, strict=True)
    }


def less_divergence(
    rewards: Sequence[Sequence[SessionRewards]], divergences: Divergences, factor: float
) -> list[list[SessionRewards]]:
    """Return the rewards, by group, less the factor times the sum over each interaction's tokens.

    Source: RLOO (arXiv 2402.14740).
    """
    lost = {place: factor * float(d.sum()) for place, d in divergences.items()}
    return [
        [
            replace(r, rewards=[x - lost.get((group, s, k), 0.0) for k, x in enumerate(r.rewards)])
            for s, r in enumerate(of_group)
        ]
        for group, of_group in enumerate(rewards)
    ]


def with_returns(row: Row, divergence: Tensor, factor: float) -> Row:
    """Return the row with an advantage for each token: the divergence of the tokens before it,
    which are no consequence of it, is given back.

    Source: REINFORCE++ (arXiv 2501.03262), ``A_t = r - beta * (KL_t + ... + KL_n)``.
    """
    mask = row["loss_mask"].bool()
    advantages = row["advantages"].double().expand(len(mask)).clone()
    advantages[mask] += factor * (divergence.cumsum(0) - divergence)
    return row | {"advantages": advantages.float()}
