"""The files of a LoRA adapter, as peft writes them; no torch is needed to check them.

An adapter that is more than ``W x + s B A x`` at linear layers is refused by name, and so is each
setting of peft's that this module does not know: the engine would leave out its effect.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from any_agent.config.base import NAME_PATTERN
from any_agent.errors import ConfigError
from any_agent.rundir.checksums import tensor_ends, tensor_ends_in

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_READ = {"peft_type", "r", "lora_alpha", "use_rslora", "bias", "init_lora_weights"}
_WITHOUT_EFFECT = {
    # About where it comes from and how it is trained.
    *("base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version"),
    *("auto_mapping", "lora_dropout", "runtime_config"),
    # The names of the tensors tell which layers are adapted.
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    # Of features that another setting switches on.
    *("megatron_core", "qalora_group_size"),
}
_PLAIN_STARTS = (True, False, "gaussian", "orthogonal")
"""The initial values with which peft leaves the base model's weights as they are."""
_INSTEAD = "serve a plain LoRA adapter, or its base merged with it (peft's merge_and_unload)"


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The settings of an adapter that decide what it computes."""

    rank: int
    scaling: float
    """The factor ``s`` of ``s B A``."""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter's settings and the bytes of its safetensors file."""

    config: AdapterConfig
    weights: bytes
    fingerprint: str
    """A digest of both files, 16 hexadecimal digits: another version of the adapter has another."""


def check_adapter(name: str, folder: str | Path) -> AdapterConfig:
    """Return an adapter's settings; ConfigError, by its name, for one that cannot be served.

    Of the weights only the head of the file is read.
    """
    what, path = _found(name, folder, None)
    settings = _bytes(what, path / CONFIG)
    try:
        tensors = tensor_ends(path / WEIGHTS)
    except (OSError, ValueError) as error:
        raise _unreadable(what, path, error) from None
    return _checked(what, path, settings, tensors)


def read_adapter(name: str, folder: str | Path, what: str | None = None) -> AdapterFiles:
    """Read an adapter's files; ConfigError as :func:`check_adapter`.

    Each is read once, so that what is checked is what is served, whoever writes meanwhile. Errors
    call the adapter ``what``; None: the setting `engine.adapters.NAME`.
    """
    what, path = _found(name, folder, what)
    settings, weights = _bytes(what, path / CONFIG), _bytes(what, path / WEIGHTS)
    try:
        tensors = tensor_ends_in(io.BytesIO(weights), len(weights))
    except ValueError as error:
        raise _unreadable(what, path, error) from None
    config = _checked(what, path, settings, tensors)
    digest = hashlib.blake2b(settings, digest_size=8)
    # Its length keeps the two files apart.
    digest.update(len(settings).to_bytes(8, "little"))
    digest.update(weights)
    return AdapterFiles(config, weights, digest.hexdigest())


def require_name(name: str) -> None:
    """Raise ConfigError for a name that no adapter can have."""
    if not re.fullmatch(NAME_PATTERN, name):
        raise ConfigError(
            f"{name[:80]!a} cannot be an adapter's name: it must be a letter or a digit, and up to "
            "63 more letters, digits, dots, underscores or hyphens"
        )


def _found(name: str, folder: str | Path, what: str | None) -> tuple[str, Path]:
    """Return what errors call an adapter, and its folder, which has both files."""
    require_name(name)
    what, path = what or f"engine.adapters.{name}", Path(folder)
    if not path.is_dir():
        raise ConfigError(f"{what}: there is no folder {path}; give the folder of {CONFIG}")
    if missing := [file for file in (CONFIG, WEIGHTS) if not (path / file).is_file()]:
        raise ConfigError(
            f"{what}: {path} lacks {' and '.join(missing)}; give a folder that peft wrote, such as "
            "the folder adapter in a checkpoint of train.lora"
        )
    return what, path


def _bytes(what: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{what}: {path} cannot be read ({error})") from None


def _unreadable(what: str, path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"{what}: {path / WEIGHTS} cannot be read ({error}); write the adapter again"
    )


def _checked(what: str, path: Path, settings: bytes, tensors: Iterable[str]) -> AdapterConfig:
    """Return the settings of an adapter of these bytes and tensors; ConfigError as above."""
    config = _config(what, path, _object(what, path / CONFIG, settings))
    parts: dict[str, set[str]] = {}
    for tensor in tensors:
        match = _TENSOR.fullmatch(tensor)
        if match is None:
            raise ConfigError(
                f"{what}: {path} has the tensor {tensor[:200]!a}, which is no LoRA matrix of a "
                "linear layer (DoRA, an embedding, and a layer trained as a whole have others); "
                f"{_INSTEAD}"
            )
        parts.setdefault(match[1], set()).add(match[2])
    if odd := sorted(layer for layer, found in parts.items() if len(found) < 2):
        raise ConfigError(f"{what}: {path} has one of the two matrices of {odd[0]!a} only")
    if not parts:
        raise ConfigError(f"{what}: {path} adapts no layer")
    return config


def layer_of(tensor: str) -> tuple[str, str]:
    """Return the layer's name in the model, and A or B, for a tensor's name in the file."""
    match = _TENSOR.fullmatch(tensor)
    assert match is not None, "check_adapter has read the names"
    return match[1], match[2]


def _object(what: str, path: Path, settings: bytes) -> Mapping[str, Any]:
    try:
        data = json.loads(settings)
    except ValueError as error:
        raise ConfigError(f"{what}: {path} cannot be read as JSON ({error})") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{what}: {path} is no JSON object")
    return data


def _config(what: str, path: Path, data: Mapping[str, Any]) -> AdapterConfig:
    def refuse(name: str) -> ConfigError:
        shown = json.dumps(data[name])[:80]
        return ConfigError(
            f"{what}: {path / CONFIG} has {name[:80]}={shown}, which this engine does not compute; "
            f"{_INSTEAD}"
        )

    if data.get("peft_type") != "LORA":
        raise ConfigError(
            f"{what}: {path / CONFIG} is of the type {str(data.get('peft_type'))[:80]!a}, and this "
            f"engine computes LORA only; {_INSTEAD}"
        )
    for name, value in data.items():
        if name not in _READ | _WITHOUT_EFFECT and value not in (None, False, 0, "", [], {}):
            raise refuse(name)
    if data.get("bias", "none") != "none":
        raise refuse("bias")
    if data.get("init_lora_weights", True) not in _PLAIN_STARTS:
        raise refuse("init_lora_weights")
    rank, alpha = data.get("r"), data.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise ConfigError(f"{what}: r in {path / CONFIG} must be a number of at least 1")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ConfigError(f"{what}: lora_alpha in {path / CONFIG} must be a finite number")
    return AdapterConfig(rank, alpha / (math.sqrt(rank) if data.get("use_rslora") else rank))
