"""The processes that train together, and what they divide: FSDP2 around a transformers model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from any_agent.errors import ConfigError, StartupError
from trainer.loss import LossStats

TIMEOUT = 600.0
"""Seconds that one process waits for the others in one exchange before one counts as lost."""


@dataclass(frozen=True, slots=True)
class World:
    """This process among those that train together. Rank 0 leads."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    """One dimension: the processes that weights are divided among."""
    timeout: float = TIMEOUT
    """Seconds that this process waits for another one's message."""

    @property
    def leads(self) -> bool:
        return self.rank == 0


def started_together(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of processes that torchrun started together; 1 without torchrun."""
    try:
        return int(environment.get("WORLD_SIZE", "1"))
    except ValueError:
        return 1


def follows(environment: Mapping[str, str] = os.environ) -> bool:
    """Return True if another process leads this one."""
    return started_together(environment) > 1 and environment.get("RANK", "0") != "0"


def require_processes(wanted: int, environment: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError unless torchrun started as many processes here as are configured."""
    here = 1
    if started_together(environment) > 1:
        here = int(environment.get("LOCAL_WORLD_SIZE", "1"))
    if wanted not in (1, here):
        raise ConfigError(
            f"train.processes={wanted}, but this machine runs {here}: start the script by "
            f"torchrun --nproc-per-node {wanted}, or set train.processes={here}"
        )


def join(device: str) -> World:
    """Meet the other processes; StartupError if they do not come.

    ``device`` is `cpu`, for gloo, or `cuda`, for NCCL: each process takes the GPU of its number on
    its machine.
    """
    here = _device(device)
    backend = "gloo" if here.type == "cpu" else "cpu:gloo,cuda:nccl"
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=TIMEOUT))
    except (RuntimeError, ValueError) as error:
        raise StartupError(f"the training processes did not connect: {error}") from error
    size = dist.get_world_size()
    return World(dist.get_rank(), size, here, init_device_mesh(here.type, (size,)))


@contextmanager
def in_turn(world: World | None) -> Iterator[None]:
    """Run the body in one process of each machine after the other, so that one loads at a time."""
    if world is None or world.size == 1:
        yield
        return
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    mine = int(os.environ.get("LOCAL_RANK", "0"))
    # On the CPU even with GPUs: NCCL's calls return before the other processes arrive.
    most = torch.tensor(here)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    for turn in range(int(most)):
        if turn == mine:
            yield
        dist.all_reduce(most)


def alone(device: str) -> World:
    """Return a world of this process only, without a network, for features of divided weights."""
    here = torch.device(device)
    if not dist.is_initialized():
        backend = "gloo" if here.type == "cpu" else "cpu:gloo,cuda:nccl"
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    return World(0, 1, here, init_device_mesh(here.type, (1,)))


def leave() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _device(kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    number, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if number >= there:
        raise ConfigError(
            f"train.processes: process {number + 1} of this machine has no GPU, because there are "
            f"{there}; set train.processes={there}"
        )
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


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
    for module in [*layers_of(whole.model), whole]:
        fully_shard(module, mesh=world.mesh, mp_policy=mixed, offload_policy=policy)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        # gloo has no scaled sum; NCCL's would be one with a factor of 1.
        module.set_force_sum_reduction_for_comms(True)


def layers_of(model: Any) -> list[nn.Module]:
    """Return the decoder layers of a transformers model, divided or whole."""
    kinds = set(model._no_split_modules or ())
    return [m for m in model.modules() if type(m).__name__.removeprefix("FSDP") in kinds]


def is_divided(tensor: Tensor) -> bool:
    """Return True if this process has only a share of the tensor: a DTensor."""
    return hasattr(tensor, "full_tensor")


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's share of a divided tensor, any other as it is; memory is shared."""
    part: Tensor = tensor.to_local() if is_divided(tensor) else tensor  # type: ignore[attr-defined]
    return part


def whole_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a divided tensor as one, any other as it is; all processes must call it together."""
    if not is_divided(tensor):
        return tensor
    # Offloaded tensors are gathered by the fast backend, too.
    here = tensor if tensor.device.type == device.type else tensor.to(device)
    full: Tensor = here.full_tensor()  # type: ignore[attr-defined]
    return full


def summed(stats: LossStats, world: World) -> LossStats:
    """Return the statistics of all processes together; each must call it."""
    names = [f.name for f in fields(stats)]
    values = torch.tensor([float(getattr(stats, name)) for name in names], dtype=torch.float64)
    every = gathered(values, world).view(world.size, -1)
    parts = (LossStats(**dict(zip(names, each.tolist(), strict=True))) for each in every)
    out = sum(parts, LossStats())
    for name in ("tokens", "tokens_computed", "tokens_in_rows"):
        setattr(out, name, round(getattr(out, name)))
    return out


def added(values: Tensor, world: World) -> Tensor:
    """Return the sum of all processes' tensors; each must call it."""
    here = values.to(world.device)
    dist.all_reduce(here)
    return here.to(values.device)


def gathered(values: Tensor, world: World) -> Tensor:
    """Return all processes' tensors [n], n their own, one after the other; each must call it."""
    here = values.to(world.device)
    own = torch.tensor([len(here)], device=world.device)
    counts = [torch.zeros_like(own) for _ in range(world.size)]
    dist.all_gather(counts, own)
    longest = max(int(count) for count in counts)
    padded = torch.nn.functional.pad(here, (0, longest - len(here)))
    every = [torch.empty_like(padded) for _ in range(world.size)]
    dist.all_gather(every, padded)
    parts = zip(every, counts, strict=True)
    return torch.cat([part[: int(count)] for part, count in parts]).to(values.device)
