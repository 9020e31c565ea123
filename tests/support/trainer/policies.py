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
from trainer.model import PolicyConfig, prepared
from trainer.packing import padded_passes
from trainer.pass_runner import Computed, PassRunner, Teacher
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


def teach(policy: Policy, model: Any) -> Any:
    """Give the policy this teacher, divided as the policy is, and return its model."""
    config = PolicyConfig(threads=1, packing=policy.config.packing)
    whole = prepared(model.requires_grad_(False), config, policy.world)
    tokens = policy.runner.pass_tokens
    runner = PassRunner(whole, policy.device, config, policy.world, tokens)
    policy.runner.compute_like(runner)
    policy.teacher = Teacher.of(whole, runner, policy.device)
    return whole.model


def other_model(seed: int = 5) -> Any:
    """A model of the policies' token ids, narrower and deeper, in float64."""
    model = make_model(VOCAB, seed, hidden_size=16, layers=3, context=256)
    return in_precision(model, torch.float64)


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


def row_of(
    ids: Sequence[int] | Tensor,
    mask: Sequence[int] | Tensor,
    *,
    logprobs: Tensor | None = None,
    versions: Sequence[int] | None = None,
) -> Row:
    """A row without a training signal; its trained tokens are of version 0 unless it is given."""
    trained = torch.as_tensor(mask, dtype=torch.int32)
    of_tokens = torch.where(trained.bool(), 0, -1) if versions is None else torch.tensor(versions)
    return {
        "input_ids": torch.as_tensor(ids, dtype=torch.int32),
        "loss_mask": trained,
        "logprobs": torch.zeros(len(trained)) if logprobs is None else logprobs * trained,
        "versions": of_tokens.int(),
        "attention_mask": torch.ones(len(trained), dtype=torch.bool),
        "rewards": torch.tensor(0.0),
    }


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
        logprobs = -math.log(VOCAB) - 1.5 * torch.randn(n, generator=g, dtype=dtype).abs()
        ids = torch.randint(0, VOCAB, (n,), generator=g, dtype=torch.int32)
        advantage, chance = (float(draw((), generator=g)) for draw in (torch.randn, torch.rand))
        row = row_of(ids, mask, logprobs=logprobs)
        rows.append(with_training_signal(row, advantage=advantage, temperature=0.5 + chance))
    return rows


def computed(policy: Policy, rows: Sequence[Row]) -> Computed:
    """Padded rows in one pass."""
    (done,) = policy.runner.run(padded_passes(rows, 10_000))
    return done


def dense_table(model: Any, row: Row) -> Tensor:
    """Log-probabilities of all ids at each of a row's trained tokens, [tokens, ids], on full
    logits."""
    logits = model(input_ids=row["input_ids"][None].long(), use_cache=False).logits[0]
    table = torch.log_softmax(logits / row["temperatures"].to(logits.dtype), dim=-1)
    return table[row["loss_mask"].nonzero()[:, 0] - 1]


def dense_logprobs(model: Any, row: Row) -> Tensor:
    """The log-probabilities of a row's trained tokens."""
    ids = row["input_ids"][row["loss_mask"].bool()].long()
    return dense_table(model, row).gather(-1, ids[:, None])[:, 0]


def dense_entropies(model: Any, row: Row) -> Tensor:
    table = dense_table(model, row)
    return -(table.exp() * table).sum(-1)


def dense_loss(model: Any, rows: Sequence[Row], config: LossConfig) -> Tensor:
    """The loss as the formula says it, token by token, on full logits of one row at a time."""
    terms = []
    for row in rows:
        a, recorded = float(row["advantages"]), row["logprobs"][row["loss_mask"].bool()]
        for logprob, mu in zip(dense_logprobs(model, row), recorded.tolist(), strict=True):
            w = min(math.exp(float(logprob.detach()) - mu), config.is_cap)
            rho = torch.exp(logprob - logprob.detach())
            value = float(rho.detach())
            bounded = min(max(value, 1 - config.eps_low), 1 + config.eps_high) * a
            terms.append(-w * (rho * a if value * a <= bounded else torch.tensor(bounded)))
    return torch.stack([term.double() for term in terms]).sum() / len(terms)


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
