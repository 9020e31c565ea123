"""Weights, gradients and optimizer divided among processes: FSDP2 around a transformers model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.loss import LossStats
from trainer.world import World


class UnshardedModel(nn.Module):
    """A module around a model, in whose forward all weights that are used are whole.

    FSDP2 gathers weights when a module's forward begins. Log-probabilities use the body and the
    head separately, so both must run within the forward of one module around them.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Return ``work(model, *arguments)``: a tensor, or a tuple of tensors with gradients."""
        return work(self.model, *arguments)


def shard(whole: UnshardedModel, world: World, *, dtype: torch.dtype | None, offload: bool) -> None:
    """Divide each decoder layer, and the remaining weights, among the processes, in place.

    Shares have the master type; ``dtype`` is the type that passes compute in, None: the same.
    Gradients are summed over the processes, in the master type, and never averaged: the loss is
    divided by the tokens of all processes.
    """
    # Imported here: it takes a second that a single process need not spend.
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        FSDPModule,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    mixed = MixedPrecisionPolicy(
        param_dtype=dtype,
        reduce_dtype=torch.float32 if dtype is not None else None,
        # Temperatures would lose digits that the log-probabilities need.
        cast_forward_inputs=False,
    )
    # Memory that is moved to a GPU and back must be pinned.
    pinned = world.device.type == "cuda"
    policy = CPUOffloadPolicy(pin_memory=pinned) if offload else OffloadPolicy()
    kinds = set(whole.model._no_split_modules or ())
    layers = [module for module in whole.model.modules() if type(module).__name__ in kinds]
    for module in [*layers, whole]:
        fully_shard(module, mesh=world.mesh, mp_policy=mixed, offload_policy=policy)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        # gloo has no scaled sum; NCCL's would be one with a factor of 1.
        module.set_force_sum_reduction_for_comms(True)


def is_divided(tensor: Tensor) -> bool:
    """Return True if this process has only a share of the tensor: a DTensor."""
    return hasattr(tensor, "full_tensor")


def whole_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a divided tensor as one, any other as it is; all processes must call it together."""
    if not is_divided(tensor):
        return tensor
    # Offloaded tensors are gathered by the fast backend, too.
    here = tensor if tensor.device.type == device.type else tensor.to(device)
    full: Tensor = here.full_tensor()  # type: ignore[attr-defined]
    return full


def summed(stats: LossStats, world: World) -> LossStats:
    """Return the statistics summed over all processes; each must call it."""
    names = [f.name for f in fields(stats)]
    values = torch.tensor([float(getattr(stats, name)) for name in names], dtype=torch.float64)
    values = values.to(world.device)
    dist.all_reduce(values)
    out = LossStats(**dict(zip(names, values.tolist(), strict=True)))
    out.tokens = round(out.tokens)
    return out
