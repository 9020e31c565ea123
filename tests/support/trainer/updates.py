"""Train steps of several updates."""

from __future__ import annotations

from torch import Tensor

from trainer.loss import LossConfig
from trainer.policy import Policy

SEQUENCE_LEVEL = LossConfig(
    "gspo", eps_low=0.9, eps_high=5.0, is_level="sequence", kl_coef=0.1, kl_estimator="k2"
)
"""A loss that needs every input there is, and whose clip leaves the gradient of most rows."""


def state_of(policy: Policy) -> list[Tensor]:
    """Copies of the weights and of the optimizer's state."""
    parameters = list(policy.model.parameters())
    moments = [t for p in parameters for t in policy.optimizer.state.get(p, {}).values()]
    return [t.detach().clone() for t in [*parameters, *moments]]
