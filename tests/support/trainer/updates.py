"""Train steps of several updates: a loss that records what it is given, and a plain oracle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import trainer.policy
from tests.support.trainer.policies import dense_logprobs
from trainer.loss import LossConfig, LossStats, policy_loss
from trainer.packing import Row
from trainer.policy import Policy


@dataclass(slots=True)
class Recorder:
    """The loss `recorded`: GRPO's, and what each call of it got, one entry per token."""

    calls: list[dict[str, Tensor]] = field(default_factory=list)

    def __call__(self, logprobs: Tensor, *given: Any, **more: Any) -> tuple[Tensor, LossStats]:
        names = ("proximal", "reference", "sequence_log_ratio", "sequence_log_weight")
        further = {name: more.pop(name) for name in names if name in more}
        behaviour, advantages = given
        self.calls.append(
            {"logprobs": logprobs.detach(), "behaviour": behaviour, "advantages": advantages}
            | further
        )
        return policy_loss(logprobs, *given, proximal=further.get("proximal"), **more)


SEQUENCE_LEVEL = LossConfig("tests.support.trainer.updates.sequence_loss", kl_coef=0.1)


def sequence_loss(
    logprobs: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    *,
    total_tokens: int,
    **inputs: Any,
) -> tuple[Tensor, LossStats]:
    """A loss by each row's mean log ratio (arXiv 2507.18071, without its clip), weighted by that of
    pi_prox and mu, with the k3 estimate of the KL divergence; it needs every input there is."""
    ratio = inputs.get("sequence_log_ratio", torch.zeros_like(logprobs))
    ratio = torch.exp(ratio + logprobs - logprobs.detach())
    weight = torch.exp(inputs["sequence_log_weight"]).clamp(max=2.0)
    apart = inputs["reference"] - logprobs
    per_token = -weight * ratio * advantages + 0.1 * (torch.exp(apart) - apart - 1)
    loss = per_token.sum() / total_tokens
    proximal = inputs.get("proximal", logprobs.detach())
    stats = LossStats(
        tokens=logprobs.numel(),
        loss=float(loss.detach()),
        ratio=float(ratio.detach().sum()),
        mismatch=float((proximal - behaviour).sum()),
    )
    return loss, stats


@contextmanager
def every_input() -> Iterator[None]:
    """The loss SEQUENCE_LEVEL is known to need the mean log ratios of rows."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("needs_sequence_ratio", "needs_sequence_weight"):
            patch.setattr(trainer.policy, name, lambda config: config == SEQUENCE_LEVEL)
        yield


def plain_step(
    policy: Policy, rows: Sequence[Row], parts: Sequence[Sequence[int]], epochs: int
) -> None:
    """A train step as its definition says it: row by row, on full logits."""
    config = LossConfig()
    with torch.no_grad():
        proximal = [dense_logprobs(policy.model, row) for row in rows]
    for _ in range(epochs):
        for part in parts:
            policy.optimizer.zero_grad()
            total = sum(int(rows[k]["loss_mask"].sum()) for k in part)
            for k in part:
                row, mask = rows[k], rows[k]["loss_mask"].bool()
                logprobs = dense_logprobs(policy.model, row)
                a = row["advantages"].to(logprobs)
                ratio = torch.exp(logprobs - proximal[k])
                bounded = ratio.clamp(1 - config.eps_low, 1 + config.eps_high) * a
                weight = torch.exp(proximal[k] - row["logprobs"][mask]).clamp(max=config.is_cap)
                (-(weight * torch.minimum(ratio * a, bounded)).sum() / total).backward()
            norm = torch.nn.utils.clip_grad_norm_(
                policy.model.parameters(), policy.config.grad_clip
            )
            assert torch.isfinite(norm)
            policy.optimizer.step()
    policy.optimizer.zero_grad()


def state_of(policy: Policy) -> list[Tensor]:
    """Copies of the weights and of the optimizer's state."""
    parameters = list(policy.model.parameters())
    moments = [t for p in parameters for t in policy.optimizer.state.get(p, {}).values()]
    return [t.detach().clone() for t in [*parameters, *moments]]
