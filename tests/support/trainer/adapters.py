"""Policies with an adapter that is not zero, and the same policies without one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.support.trainer.policies import random_rows, small_policy
from trainer.lora import Lora, adapter_tensors, layers
from trainer.loss import LossConfig
from trainer.model import PolicyConfig
from trainer.policy import Policy
from trainer.rows import Row, count_trained

LORA = Lora(rank=4, alpha=12, seed=5)
"""Its scale is 3, which no forgotten or doubled factor leaves as it is."""
CONFIG = PolicyConfig(lr=1e-3, threads=1, lora=LORA)


def adapted_policy(dtype: torch.dtype = torch.float64, lora: Lora = LORA, **config: Any) -> Policy:
    """Return `small_policy`, with an adapter that changes what the model computes."""
    return stirred(small_policy(dtype=dtype, lora=lora, **config))


def stirred(policy: Policy, seed: int = 7) -> Policy:
    """The policy with other matrices than those that training begins with."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapter_tensors(policy.model).values():
            fresh = 0.2 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            if isinstance(parameter, DTensor):
                mesh, places = parameter.device_mesh, parameter.placements
                fresh = distribute_tensor(fresh, mesh, places)
            parameter.copy_(fresh)
    return policy


def full_policy(policy: Policy) -> Policy:
    """A policy without an adapter whose weights are the other one's, added up here in float64."""
    config = replace(policy.config, lora=None)
    own = small_policy(dtype=next(policy.model.parameters()).dtype)
    state = own.model.state_dict()
    for name, tensor in plain_sums(policy).items():
        state[name].copy_(tensor)
    return Policy(own.model, config)


def plain_sums(policy: Policy) -> dict[str, Tensor]:
    """Every weight by its name without an adapter: the base's, or base and adapter in float64."""
    state = {n: p.detach().double() for n, p in policy.model.named_parameters()}
    out = {n.replace(".base_layer", ""): p for n, p in state.items() if ".lora_" not in n}
    lora = policy.config.lora
    assert lora is not None
    for name in layers(policy.model):
        a, b = (state[f"{name}.lora_{part}.default.weight"] for part in "AB")
        out[f"{name}.weight"] = out[f"{name}.weight"] + lora.alpha / lora.rank * (b @ a)
    return out


def gradients_of_adapter(
    policy: Policy, rows: list[Row], budget: int
) -> tuple[float, dict[str, Tensor]]:
    """The loss, and the gradients of the adapter; there are no others."""
    loss, found = all_gradients(policy, rows, budget)
    adapter = adapter_tensors(policy.model)
    assert found.keys() <= adapter.keys()
    return loss, {name: found[name] for name in adapter if name in found}


def all_gradients(
    policy: Policy, rows: list[Row], budget: int | None = None
) -> tuple[float, dict[str, Tensor]]:
    """The loss, and the gradients of all that has one."""
    policy.model.zero_grad(set_to_none=True)
    stats = policy.accumulate(policy.runner.plan(rows, budget), count_trained(rows), LossConfig())
    return stats.loss, {
        name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None
    }


def row_logprobs(policy: Policy, rows: list[Row], budget: int | None = None) -> list[Tensor]:
    return policy.runner.row_logprobs(rows, budget)


def weights_of(policy: Policy, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    return {name: t.clone() for bucket in policy.buckets(3000, dtype) for name, t in bucket}


def train(policy: Policy, seeds: range) -> None:
    for seed in seeds:
        policy.train(random_rows(seed, dtype=torch.float32), 60)
