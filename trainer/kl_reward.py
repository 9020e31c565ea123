"""A divergence from the reference model in the reward of each output.

The divergence at a token is `log mu - log pi_ref`, mu as recorded: the estimate k1 for the policy
that sampled the token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from any_agent.errors import TrainingError
from trainer.advantage import SessionRewards
from trainer.rows import Row


def found_divergences(
    rows: Sequence[Row], reference: Callable[[Sequence[Row]], Sequence[Tensor]]
) -> list[Tensor]:
    """Return the divergence at each trained token of these rows, [n] float64 each.

    ``reference`` returns the reference model's log-probabilities of rows' trained tokens. Raises
    TrainingError where one is not finite.
    """
    found = reference(rows)
    if not all(bool(values.isfinite().all()) for values in found):
        raise TrainingError(
            "a log-probability of the reference model is not finite: check train.reference_model"
        )
    # A recorded one that is not finite has its error in the loss, which names the token.
    return [
        (row["logprobs"][row["loss_mask"].bool()].double() - values).nan_to_num(0, 0, 0)
        for row, values in zip(rows, found, strict=True)
    ]


def less_divergence(
    rewards: SessionRewards, divergences: Sequence[Tensor], factor: float
) -> SessionRewards:
    """Return a session's rewards, less the factor times the sum over each output's tokens.

    ``divergences`` are those of its counted interactions; none: they are not known.

    Source: RLOO (arXiv 2402.14740).
    """
    lost = iter([factor * float(d.sum()) for d in divergences])
    pairs = zip(rewards.rewards, rewards.counted, strict=True)
    return replace(rewards, rewards=[r - next(lost, 0.0) if one else r for r, one in pairs])


def with_returns(row: Row, divergence: Tensor, factor: float) -> Row:
    """Return the row with an advantage for each token: the divergence of the tokens before it,
    which are no consequence of it, is given back.

    Source: REINFORCE++ (arXiv 2501.03262), ``A_t = r - beta * (KL_t + ... + KL_n)``.
    """
    mask = row["loss_mask"].bool()
    advantages = row["advantages"].double().expand(len(mask)).clone()
    advantages[mask] += factor * (divergence.cumsum(0) - divergence)
    return row | {"advantages": advantages.float()}
