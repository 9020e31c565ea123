"""Random rows, small policies, and a second, plain way to compute what the trainer computes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from any_agent.demo.models.tiny import make_model
from trainer.loss import LossConfig
from trainer.model import PolicyConfig
from trainer.packing import padded_passes
from trainer.pass_runner import Computed
from trainer.policy import Policy
from trainer.rows import Row, count_trained, with_training_signal
from trainer.world import World

VOCAB = 48


def small_policy(
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    world: World | None = None,
    **config: Any,
) -> Policy:
    """Two layers of width 32; float64 unless a test is about float32."""
    torch.set_num_threads(1)
    model = make_model(VOCAB, seed, hidden_size=32, layers=2, context=256)
    return Policy(in_precision(model, dtype), PolicyConfig(**config), world)


def in_precision(model: Any, dtype: torch.dtype) -> Any:
    """The model in this type. In float64 its norms compute in it too, instead of in float32, so
    that sums in another order give the same digits."""
    if dtype == torch.float64:
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = partial(_norm, module)
    return model.to(dtype)


def _norm(module: Any, x: Tensor) -> Tensor:
    square = x.pow(2).mean(-1, keepdim=True)
    if type(module).__name__.startswith("Gemma"):
        return (1 + module.weight) * x * torch.rsqrt(square + module.eps)
    return module.weight * x * torch.rsqrt(square + module.variance_epsilon)


def random_rows(
    seed: int, count: int = 6, *, longest: int = 24, dtype: torch.dtype = torch.float64
) -> list[Row]:
    """Rows of several turns with advantages of both signs and a temperature of their own.

    Behaviour log-probabilities are near -log(VOCAB), some far below, so that the cap is reached.
    """
    g = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        n = int(torch.randint(6, longest + 1, (), generator=g))
        mask = (torch.rand(n, generator=g) < 0.5).int()
        mask[0], mask[-1] = 0, 1
        spread = torch.randn(n, generator=g, dtype=dtype)
        row = {
            "input_ids": torch.randint(0, VOCAB, (n,), generator=g, dtype=torch.int32),
            "loss_mask": mask,
            "logprobs": (-math.log(VOCAB) - 1.5 * spread.abs()) * mask,
            "versions": torch.where(mask.bool(), 0, -1).int(),
            "attention_mask": torch.ones(n, dtype=torch.bool),
            "rewards": torch.tensor(0.0),
        }
        rows.append(
            with_training_signal(
                row,
                advantage=float(torch.randn((), generator=g)),
                temperature=float(0.5 + torch.rand((), generator=g)),
            )
        )
    return rows


def computed(policy: Policy, rows: Sequence[Row]) -> Computed:
    """Padded rows in one pass."""
    (done,) = policy.runner.run(padded_passes(rows, 10_000))
    return done


def dense_logprobs(model: Any, row: Row) -> Tensor:
    """The log-probabilities of a row's trained tokens, on full logits."""
    ids = row["input_ids"].long()
    logits = model(input_ids=ids[None], use_cache=False).logits[0]
    table = torch.log_softmax(logits / row["temperatures"].to(logits.dtype), dim=-1)
    places = row["loss_mask"].nonzero()[:, 0]
    return table[places - 1, ids[places]]


def dense_loss(
    model: Any, rows: Sequence[Row], config: LossConfig, prox_shift: Sequence[float] | None = None
) -> Tensor:
    """The loss as the formula says it, token by token, on full logits of one row at a time."""
    total = torch.zeros((), dtype=torch.float64)
    n = 0
    for k, row in enumerate(rows):
        logits = model(input_ids=row["input_ids"][None].long(), use_cache=False).logits[0]
        table = torch.log_softmax(logits / row["temperatures"].to(logits.dtype), dim=-1)
        for t in range(1, len(row["input_ids"])):
            if not row["loss_mask"][t]:
                continue
            logprob = table[t - 1, int(row["input_ids"][t])]
            prox = logprob.detach() + (prox_shift[k] if prox_shift else 0.0)
            w = min(math.exp(float(prox.detach()) - float(row["logprobs"][t])), config.is_cap)
            rho = torch.exp(logprob - prox)
            a = float(row["advantages"])
            value = float(rho.detach())
            bounded = min(max(value, 1 - config.eps_low), 1 + config.eps_high) * a
            total = total - w * (rho * a if value * a <= bounded else bounded)
            n += 1
    return total / n


def gradients(policy: Policy) -> dict[str, Tensor]:
    """Copies, zero where a parameter got none."""
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in policy.model.named_parameters()
    }


def dense_gradients(policy: Policy, rows: Sequence[Row], config: LossConfig) -> dict[str, Tensor]:
    policy.model.zero_grad(set_to_none=True)
    dense_loss(policy.model, rows, config).backward()
    out = gradients(policy)
    policy.model.zero_grad(set_to_none=True)
    return out


def trainer_gradients(
    policy: Policy,
    rows: Sequence[Row],
    config: LossConfig | None = None,
    *,
    token_budget: int = 10_000,
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients by the path that ``Policy.step`` takes, without the update."""
    policy.model.zero_grad(set_to_none=True)
    total = count_trained(rows)
    stats = policy.accumulate(policy.runner.plan(rows, token_budget), total, config or LossConfig())
    out = gradients(policy)
    policy.model.zero_grad(set_to_none=True)
    return stats.loss, out


def assert_same(
    got: dict[str, Tensor], expected: dict[str, Tensor], *, atol: float, rtol: float = 0.0
) -> None:
    assert got.keys() == expected.keys()
    assert any(bool(t.any()) for t in expected.values()), "comparing zeros proves nothing"
    for name, tensor in expected.items():
        torch.testing.assert_close(
            got[name], tensor, atol=atol, rtol=rtol, msg=lambda m, name=name: f"{name}: {m}"
        )
