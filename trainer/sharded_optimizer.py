"""The optimizer's state of divided weights: each process writes and reads its own share.

Files are those of `torch.distributed.checkpoint` in safetensors, so that any number of processes
reads the files of any other number. Each process plans for itself: the library would pickle the
messages for a common plan, and every process knows its share anyway.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from any_agent.errors import StartupError, TrainingError
from trainer.policy import Policy


def moments(policy: Policy) -> dict[str, Tensor]:
    """Return the optimizer's tensors as `<parameter>/<key>`, divided as the parameters are."""
    out = {}
    for name, parameter in policy.model.named_parameters():
        for key, value in policy.optimizer.state.get(parameter, {}).items():
            out[f"{name}/{key}"] = value.detach()
    return out


def save_shard(policy: Policy, folder: Path) -> None:
    """Write this process's share into ``folder``, without the values that all processes share.

    Raises TrainingError if that fails.
    """
    assert policy.world is not None
    mine = {name: t for name, t in moments(policy).items() if _has_part(t)}
    if mine:
        with _translated_errors(f"{folder}: the optimizer's state cannot be written"):
            state_dict_saver.save(
                dict(mine),
                storage_writer=_ShardWriter(str(folder), policy.world.rank),
                planner=_ShardPlanner(),
                no_dist=True,
            )


def load_shards(
    folder: Path, tensors: dict[str, Tensor], what: str = "the optimizer's state"
) -> None:
    """Fill these tensors, or this process's shares of them, from the files in ``folder``.

    ``what`` they are is for messages. Raises StartupError for a tensor that is missing or has
    another shape.
    """
    reader = HuggingFaceStorageReader(str(folder))
    there = reader.read_metadata().state_dict_metadata
    for name, tensor in tensors.items():
        size = getattr(there.get(name), "size", None)
        if size != tensor.size():
            found = "nothing" if size is None else f"shape {tuple(size)}"
            raise StartupError(
                f"{folder}: {what} has {found} for {name}, the model wants shape "
                f"{tuple(tensor.size())}"
            )
    wanted = {name: t for name, t in tensors.items() if not isinstance(t, DTensor) or _has_part(t)}
    if wanted:
        with _translated_errors(f"{folder}: {what} cannot be read"):
            state_dict_loader.load(dict(wanted), storage_reader=reader, no_dist=True)


def names_in(folder: Path) -> set[str]:
    """Return the names of the tensors in the files of ``folder``."""
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names |= set(file.keys())
    return names


@contextmanager
def _translated_errors(problem: str) -> Iterator[None]:
    """Silence the warning about a process that plans alone; raise errors as TrainingError."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except CheckpointException as error:
        causes = (cause for cause, _ in error.failures.values())
        raise TrainingError(f"{problem}: {next(causes, error)}") from error


def _has_part(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and tensor.to_local().numel() > 0


class _ShardWriter(HuggingFaceStorageWriter):
    """Names files by the process that writes them."""

    def __init__(self, path: str, rank: int) -> None:
        super().__init__(path, save_distributed=True)
        self._rank = rank

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data={"shard_index": self._rank + 1}) for plan in plans]


class _ShardPlanner(DefaultSavePlanner):
    """Plans one share; whether the shares make up whole tensors is checked at reading."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        self.global_plan = all_plans
        self.metadata = Metadata({})
        return all_plans, self.metadata
