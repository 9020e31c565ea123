"""Train steps of several updates: a loss that records what it is given, and a plain oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from tests.support.trainer.policies import dense_logprobs
from trainer.loss import LossConfig, LossInputs, LossStats
from trainer.policy import Policy
from trainer.rows import Row
from trainer.surrogates import grpo

SEQUENCE_LEVEL = LossConfig(
    "gspo", eps_low=0.9, eps_high=5.0, is_level="sequence", kl_coef=0.1, kl_estimator="k2"
)
"""A loss that needs every input there is, and whose clip leaves the gradient of most rows."""


@dataclass(slots=True)
class Recorder:
    """GRPO's loss, and what each call of it got, one entry per token."""

    calls: list[dict[str, Tensor]] = field(default_factory=list)
    sequence_ratio: bool = True
    sequence_product: bool = True
    clipped_ratio: bool = True

    def __call__(
        self, logprobs: Tensor, inputs: LossInputs, **more: Any
    ) -> tuple[Tensor, LossStats]:
        given = {f.name: getattr(inputs, f.name) for f in fields(inputs)}
        got = {name: value for name, value in given.items() if value is not None}
        self.calls.append({"logprobs": logprobs.detach()} | got)
        return grpo(logprobs, inputs, **more)


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
