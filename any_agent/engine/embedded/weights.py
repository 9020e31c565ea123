"""New weights for a model that is already loaded: read and checked in full, then copied in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from any_agent.errors import InvalidRequest

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint directory. Raises InvalidRequest if there are none."""
    if not path.is_dir():
        raise InvalidRequest(f"{path} is not a directory")
    index = path / INDEX_NAME
    if index.is_file():
        try:
            names = set(json.loads(index.read_bytes())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise InvalidRequest(f"{index} is not a weight index: {exc!r}") from exc
        # Shards lie beside their index: an index must not lead elsewhere.
        files = [path / Path(str(name)).name for name in sorted(names, key=str)]
    else:
        files = [path / SINGLE_NAME]
    missing = [f.name for f in files if not f.is_file()]
    if missing or not files:
        raise InvalidRequest(
            f"{path} has no {', '.join(missing) or 'weights'}; only safetensors are read"
        )
    return files


def read_weights(model: Any, path: Path) -> dict[str, Tensor]:
    """All weights of a checkpoint, in memory, in the model's types, by the model's names.

    Touches nothing of ``model``. Raises InvalidRequest when a file is broken, a name or a shape
    does not match, or a weight is missing.
    """
    from safetensors import SafetensorError, safe_open

    own: dict[str, Tensor] = model.state_dict()
    weights: dict[str, Tensor] = {}
    try:
        for file in weight_files(path):
            with safe_open(file, framework="pt", device="cpu") as opened:
                names = set(opened.keys())
                if not names <= own.keys():
                    return _read_converted(model, path, own)
                for name in names:
                    _check_shape(name, tuple(opened.get_slice(name).get_shape()), own)
                # Copies: the file is mapped, and may be replaced while we serve.
                for name in names:
                    weights[name] = opened.get_tensor(name).to(own[name].dtype, copy=True)
    except (SafetensorError, OSError) as exc:
        raise InvalidRequest(f"cannot read the weights of {path}: {exc}") from exc
    _check_complete(weights, own, path)
    return weights


def _read_converted(model: Any, path: Path, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """For checkpoints whose names are not the module's: transformers converts while loading."""
    try:
        other, info = type(model).from_pretrained(
            path, dtype=model.dtype, use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as exc:
        raise InvalidRequest(f"cannot load {path}: {exc}") from exc
    wrong = [k for k in ("missing_keys", "unexpected_keys", "mismatched_keys") if info.get(k)]
    if wrong:
        said = "; ".join(f"{k}: {sorted(map(str, info[k]))[:5]}" for k in wrong)
        raise InvalidRequest(f"the weights of {path} do not fit this model: {said}")
    weights: dict[str, Tensor] = other.state_dict()
    for name, value in weights.items():
        _check_shape(name, tuple(value.shape), own)
    _check_complete(weights, own, path)
    return weights


def _check_shape(name: str, shape: tuple[int, ...], own: dict[str, Tensor]) -> None:
    if name not in own or tuple(own[name].shape) != shape:
        expected = tuple(own[name].shape) if name in own else None
        raise InvalidRequest(f"weight {name} has shape {shape}, the model's is {expected}")


def _check_complete(weights: dict[str, Tensor], own: dict[str, Tensor], path: Path) -> None:
    """Tied weights are stored under one of their names."""
    there = {own[name].data_ptr() for name in weights}
    missing = [name for name, value in own.items() if value.data_ptr() not in there]
    if missing:
        raise InvalidRequest(f"{path} lacks {len(missing)} weights, e.g. {missing[0]}")


def apply_weights(model: Any, weights: dict[str, Tensor]) -> None:
    """Copy checked weights in; runs between two steps."""
    own: dict[str, Tensor] = model.state_dict()
    with torch.inference_mode():
        for name, value in weights.items():
            own[name].copy_(value)
