"""The optimizer's state of divided weights: each process writes and reads its own share.

FSDP2 divides the first dimension of a tensor as `torch.chunk` does: a share is a range of rows. The
metadata of each safetensors file has the places of its shares, so that any number of processes
reads the files of any other number.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from any_agent.errors import StartupError, TrainingError
from trainer.policy import Policy
from trainer.world import is_divided, local_part


def moments(policy: Policy) -> dict[str, Tensor]:
    """Return the optimizer's tensors as `<parameter>/<key>`, divided as the parameters are."""
    out = {}
    for name, parameter in policy.model.named_parameters():
        for key, value in policy.optimizer.state.get(parameter, {}).items():
            out[f"{name}/{key}"] = value.detach()
    return out


def save_shard(policy: Policy, folder: Path) -> None:
    """Write this process's share into ``folder``, with the values that all processes share if it
    leads.

    Raises TrainingError if that fails.
    """
    rank = policy.world.rank if policy.world is not None else 0
    every = {name: t for name, t in moments(policy).items() if is_divided(t) or rank == 0}
    places = {name: [rows_of(t).start, *t.shape] for name, t in every.items() if is_divided(t)}
    parts = {name: local_part(t).contiguous() for name, t in every.items() if len(rows_of(t))}
    path = folder / (f"optimizer-{rank:05d}.safetensors" if rank else "optimizer.safetensors")
    try:
        save_file(parts, path, metadata={"places": json.dumps(places)})
    except (OSError, SafetensorError) as error:
        raise TrainingError(f"{path}: the optimizer's state cannot be written: {error}") from error


def load_shards(
    folder: Path, tensors: Mapping[str, Tensor], what: str = "the optimizer's state"
) -> None:
    """Fill these tensors, or this process's shares of them, from the files in ``folder``.

    ``what`` they are is for messages. Raises StartupError for a tensor that is missing or has
    another shape.
    """
    left = {name: len(rows_of(tensor)) for name, tensor in tensors.items()}
    for path in folder.glob("*.safetensors"):
        with opened(path) as file:
            for name, (there, shape) in places_in(file).items():
                if (tensor := tensors.get(name)) is None:
                    continue
                if shape != list(tensor.shape):
                    raise StartupError(
                        f"{path}: {what} has shape {tuple(shape)} for {name}, the model wants "
                        f"shape {tuple(tensor.shape)}"
                    )
                here = rows_of(tensor)
                start, stop = max(there.start, here.start), min(there.stop, here.stop)
                if start < stop:
                    from_, to = ((slice(start - k, stop - k),) for k in (there.start, here.start))
                    local_part(tensor)[to if shape else ()].copy_(
                        file.get_slice(name)[from_ if shape else ()]
                    )
                    left[name] -= stop - start
    if missing := [name for name, rows in left.items() if rows]:
        raise StartupError(
            f"{folder}: {what} has nothing, or not all, for {missing[0]}, the model wants shape "
            f"{tuple(tensors[missing[0]].shape)}"
        )


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a file of a checkpoint; StartupError that names it if it cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise StartupError(
            f"{path} cannot be read ({error}): restore it from a copy, or resume from another "
            "checkpoint"
        ) from error


def places_in(file: Any) -> dict[str, tuple[range, list[int]]]:
    """Return, by name, which rows of a tensor an open file has, and the whole tensor's shape."""
    places = json.loads((file.metadata() or {}).get("places", "{}"))
    found = {}
    for name in file.keys():  # noqa: SIM118
        own: list[int] = file.get_slice(name).get_shape()
        first, *shape = places.get(name, [0, *own])
        found[name] = range(first, first + (own or [1])[0]), shape
    return found


def rows_of(tensor: Tensor) -> range:
    """Return the rows of a whole tensor that this process has; a scalar has one."""
    rows = tensor.shape[0] if tensor.ndim else 1
    if not is_divided(tensor):
        return range(rows)
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    each = -(-rows // mesh.size())
    first = min(each * mesh.get_local_rank(), rows)
    return range(first, min(first + each, rows))
