"""The built-in losses: the policy term s of each trained token.

``rho = pi_theta / pi_prox`` of a token, A its advantage; :class:`trainer.loss.PolicyLoss` adds what
all losses share. ``docs/reference/algorithms.md`` has their defaults and tests.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from trainer.loss import LossConfig, LossInputs, PolicyLoss, Surrogate, clipped_log_ratio


@PolicyLoss
def grpo(logprobs: Tensor, proximal: Tensor, inputs: LossInputs, config: LossConfig) -> Surrogate:
    """Clip the ratio: ``s = -min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A)``.

    Sources: PPO's clip (arXiv 1707.06347), around the mean of a group (GRPO, arXiv 2402.03300),
    with two distances (DAPO, arXiv 2503.14476). Of negative advantages ``dual_clip`` bounds rho
    from above (dual-clip PPO, arXiv 1912.09729; as delta in INTELLECT-2, arXiv 2505.07291).
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
    bounded = ratio if config.dual_clip is None else ratio.clamp(max=config.dual_clip)
    loss = -torch.min(bounded * advantages, ratio.clamp(low, high) * advantages)
    is_low, is_high = (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0)
    if config.dual_clip is not None:
        is_high |= (ratio > config.dual_clip) & (advantages < 0)
    return Surrogate(loss, ratio, is_low, is_high)


@partial(PolicyLoss, clipped_ratio=True)
def gmpo(logprobs: Tensor, proximal: Tensor, inputs: LossInputs, config: LossConfig) -> Surrogate:
    """Weigh a row by the geometric mean of its tokens' ratios, each clipped by itself:
    ``s = -g A`` with ``g = exp(mean(c))`` over the row, c the token's ``log rho``, where A is
    positive at most ``eps_high``, else at least ``-eps_low``. A clipped token has no gradient.

    Source: Geometric-Mean Policy Optimization (arXiv 2507.20673).
    """
    clipped = clipped_log_ratio(logprobs.detach(), proximal, inputs.advantages, config)
    inside = clipped == logprobs.detach() - proximal
    ratio = torch.where(inside, torch.exp(logprobs - logprobs.detach()), 1.0)
    if inputs.sequence_clipped_ratio is not None:
        ratio = ratio * torch.exp(inputs.sequence_clipped_ratio)
    loss, positive = -ratio * inputs.advantages, inputs.advantages > 0
    return Surrogate(loss, ratio, ~inside & ~positive, ~inside & positive)


@PolicyLoss
def dppo(logprobs: Tensor, proximal: Tensor, inputs: LossInputs, config: LossConfig) -> Surrogate:
    """Leave out the tokens whose probability has moved too far from mu's already, in the direction
    of their advantage: ``s = -rho A``, and 0 where A is positive and ``pi_theta - mu > eps_high``,
    or A is negative and ``mu - pi_theta > eps_low``.

    The bound is one of probabilities, an estimate of the total variation, not of their ratio.

    Source: Divergence Proximal Policy Optimization (arXiv 2602.04879), by binary total variation.
    """
    ratio = torch.exp(logprobs - proximal)
    moved = torch.exp(logprobs.detach()) - torch.exp(inputs.behaviour)
    high = (inputs.advantages > 0) & (moved > config.eps_high)
    low = (inputs.advantages < 0) & (-moved > config.eps_low)
    return Surrogate((-ratio * inputs.advantages).masked_fill(low | high, 0.0), ratio, low, high)


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


@partial(PolicyLoss, sequence_product=True)
def vespo(logprobs: Tensor, proximal: Tensor, inputs: LossInputs, config: LossConfig) -> Surrogate:
    """Weigh a row by the product W of its tokens' ratios to mu, softly:
    ``s = -phi(W) A log pi_theta`` with ``phi(W) = W**k exp(lambda (1 - W))``, which is 1 at W = 1.

    k and lambda are ``k_pos`` and ``lambda_pos`` where A is not negative, else ``k_neg`` and
    ``lambda_neg``.

    Source: Variational Sequence-Level Soft Policy Optimization (arXiv 2602.10693).
    """
    assert inputs.sequence_product is not None, "inputs are checked"
    whole, negative = inputs.sequence_product, inputs.advantages < 0
    k = torch.full_like(whole, config.k_pos).masked_fill(negative, config.k_neg)
    lam = torch.full_like(whole, config.lambda_pos).masked_fill(negative, config.lambda_neg)
    phi = torch.exp(torch.xlogy(k, whole) + lam * (1 - whole))
    ratio = torch.exp(logprobs.detach() - proximal)
    return Surrogate(-phi * inputs.advantages * logprobs, ratio)


@PolicyLoss
def reinforce(
    logprobs: Tensor, proximal: Tensor, inputs: LossInputs, config: LossConfig
) -> Surrogate:
    """Clip nothing: ``s = -rho A``, whose gradient is ``-rho A grad log pi_theta``.

    Sources: REINFORCE (R. J. Williams, 1992), RLOO (arXiv 2402.14740).
    """
    ratio = torch.exp(logprobs - proximal)
    return Surrogate(-ratio * inputs.advantages, ratio)
