"""New weights for a loaded model: read and checked completely, then put into the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from any_agent.engine.weight_serialization import aligned
from any_agent.errors import InvalidRequest
from any_agent.rundir.checksums import MANIFEST, damage

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


def weight_files(path: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint directory; InvalidRequest if there are none."""
    if not path.is_dir():
        raise InvalidRequest(f"{path} is not a directory")
    index = path / INDEX_NAME
    if index.is_file():
        try:
            names = set(json.loads(index.read_bytes())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise InvalidRequest(f"{index} is not a weight index: {exc!r}") from exc
        # Shards lie beside their index: an index must not point elsewhere.
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
    """Read all weights of a checkpoint into memory, in the model's types, by the model's names.

    ``model`` is not changed. Raises InvalidRequest if a file is broken or not what its checksum
    says, a name or a shape does not match, or a weight is missing.
    """
    from safetensors import SafetensorError, safe_open

    if (path / MANIFEST).exists() and (problem := damage(path)) is not None:
        raise InvalidRequest(f"the weights in {path} are damaged: {problem}")
    own: dict[str, Tensor] = model.state_dict()
    weights: dict[str, Tensor] = {}
    try:
        for file in weight_files(path):
            with safe_open(file, framework="pt", device="cpu") as opened:
                names = set(opened.keys())
                if not names <= own.keys():
                    return _converted(model, own, path, path)
                for name in names:
                    _check_shape(name, tuple(opened.get_slice(name).get_shape()), own)
                # Copied, because the file is mapped and may be replaced during serving.
                for name in names:
                    weights[name] = opened.get_tensor(name).to(own[name], copy=True)
    except (SafetensorError, OSError) as exc:
        raise InvalidRequest(f"cannot read the weights of {path}: {exc}") from exc
    _check_complete(weights, own, path)
    return weights


def fit_weights(model: Any, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert weights by a checkpoint's names to the model's names, types and device.

    ``model`` is not changed. Raises InvalidRequest for a name or a shape that does not match, or
    for a missing weight.
    """
    own: dict[str, Tensor] = model.state_dict()
    if not given.keys() <= own.keys():
        return _converted(model, own, "the sent weights", None, state_dict=dict(given))
    for name, value in given.items():
        _check_shape(name, tuple(value.shape), own)
    _check_complete(given, own, "the sent weights")
    return {name: _like(value, own[name]) for name, value in given.items()}


def _like(value: Tensor, own: Tensor) -> Tensor:
    return aligned(value.to(device=own.device, dtype=own.dtype))


def _converted(
    model: Any, own: dict[str, Tensor], where: Path | str, path: Path | None, **more: Any
) -> dict[str, Tensor]:
    """Let transformers load and convert a checkpoint whose names are not the module's."""
    try:
        other, info = type(model).from_pretrained(
            path,
            config=model.config,
            dtype=model.dtype,
            use_safetensors=True,
            output_loading_info=True,
            **more,
        )
    except (OSError, ValueError, RuntimeError) as exc:
        raise InvalidRequest(f"cannot load {where}: {exc}") from exc
    wrong = [k for k in ("missing_keys", "unexpected_keys", "mismatched_keys") if info.get(k)]
    if wrong:
        names = "; ".join(f"{k}: {sorted(map(str, info[k]))[:5]}" for k in wrong)
        raise InvalidRequest(f"the weights of {where} do not fit this model: {names}")
    weights: dict[str, Tensor] = other.state_dict()
    for name, value in weights.items():
        _check_shape(name, tuple(value.shape), own)
    _check_complete(weights, own, where)
    return {name: _like(value, own[name]) for name, value in weights.items()}


def _check_shape(name: str, shape: tuple[int, ...], own: dict[str, Tensor]) -> None:
    if name not in own or tuple(own[name].shape) != shape:
        expected = tuple(own[name].shape) if name in own else None
        raise InvalidRequest(f"weight {name} has shape {shape}, the model's is {expected}")


def _check_complete(
    weights: Mapping[str, Tensor], own: dict[str, Tensor], where: Path | str
) -> None:
    """Raise InvalidRequest for missing weights; tied ones are stored under one of their names."""
    there = {own[name].data_ptr() for name in weights}
    missing = [name for name, value in own.items() if value.data_ptr() not in there]
    if missing:
        raise InvalidRequest(f"{where} lacks {len(missing)} weights, e.g. {missing[0]}")


def apply_weights(model: Any, weights: Mapping[str, Tensor]) -> None:
    """Put checked weights into the model, between two steps, without a copy.

    The parameter objects stay, so tied parameters stay tied.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    own: dict[str, Tensor] = model.state_dict()
    with torch.inference_mode():
        for name, value in weights.items():
            if name in parameters:
                parameters[name].data = value
            else:
                own[name].copy_(value)
