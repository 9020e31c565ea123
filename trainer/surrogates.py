"""The built-in losses: the policy term s of each trained token.

``rho = pi_theta / pi_prox`` of a token, A its advantage; :class:`trainer.loss.PolicyLoss` adds what
all losses share. ``docs/reference/algorithms.md`` has their defaults and tests.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from trainer.loss import LossConfig, LossInputs, PolicyLoss, Surrogate


@PolicyLoss
def grpo(logprobs: Tensor, proximal: Tensor, inputs: LossInputs, config: LossConfig) -> Surrogate:
    """Clip the ratio: ``s = -min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A)``.

    Sources: PPO's clip (arXiv 1707.06347), around the mean of a group (GRPO, arXiv 2402.03300),
    with two distances (DAPO, arXiv 2503.14476).
    """
    return _clipped(torch.exp(logprobs - proximal), inputs.advantages, config)


@partial(PolicyLoss, sequence_ratio=True)
def gspo(logprobs: Tensor, proximal: Tensor, inputs: LossInputs, config: LossConfig) -> Surrogate:
    """Clip the ratio of a whole row: as GRPO, with ``exp(mean(log pi_theta - log pi_prox))`` over
    the row as the value of rho, and the gradient ``rho * grad log pi_theta`` of each token.

    Source: GSPO (arXiv 2507.18071), in its token form, GSPO-token.
    """
    ratio = torch.exp(logprobs - logprobs.detach())
    if inputs.sequence_log_ratio is not None:
        ratio = ratio * torch.exp(inputs.sequence_log_ratio)
    return _clipped(ratio, inputs.advantages, config)


def _clipped(ratio: Tensor, advantages: Tensor, config: LossConfig) -> Surrogate:
    low, high = 1 - config.eps_low, 1 + config.eps_high
    loss = -torch.min(ratio * advantages, ratio.clamp(low, high) * advantages)
    is_low, is_high = (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0)
    return Surrogate(loss, ratio, is_low, is_high)


@PolicyLoss
def cispo(logprobs: Tensor, proximal: Tensor, inputs: LossInputs, config: LossConfig) -> Surrogate:
    """Clip the weight of a token's gradient, and keep every gradient:
    ``s = -stop_grad(clip(rho, 1 - eps_low, 1 + eps_high)) A log pi_theta``.

    Source: MiniMax-M1 (arXiv 2506.13585).
    """
    ratio = torch.exp(logprobs.detach() - proximal)
    low, high = 1 - config.eps_low, 1 + config.eps_high
    loss = -ratio.clamp(low, high) * inputs.advantages * logprobs
    return Surrogate(loss, ratio, ratio < low, ratio > high)


@PolicyLoss
def sapo(logprobs: Tensor, proximal: Tensor, inputs: LossInputs, config: LossConfig) -> Surrogate:
    """Let the gradient fade away from rho = 1: ``s = -(4 / tau) sigmoid(tau (rho - 1)) A``.

    tau is ``tau_pos`` where A is positive, else ``tau_neg``.

    Source: Soft Adaptive Policy Optimization (arXiv 2511.20347).
    """
    ratio = torch.exp(logprobs - proximal)
    positive = inputs.advantages > 0
    tau = torch.full_like(ratio, config.tau_neg).masked_fill(positive, config.tau_pos)
    return Surrogate(-torch.sigmoid(tau * (ratio - 1)) * 4 / tau * inputs.advantages, ratio)


@PolicyLoss
def reinforce(
    logprobs: Tensor, proximal: Tensor, inputs: LossInputs, config: LossConfig
) -> Surrogate:
    """Clip nothing: ``s = -rho A``, whose gradient is ``-rho A grad log pi_theta``.

    Sources: REINFORCE (R. J. Williams, 1992), RLOO (arXiv 2402.14740).
    """
    ratio = torch.exp(logprobs - proximal)
    return Surrogate(-ratio * inputs.advantages, ratio)
