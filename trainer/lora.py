"""LoRA (arXiv 2106.09685): a frozen base model, and a trained adapter of low rank, by `peft`.

An adapted layer computes ``W x + s B A x``: ``W`` [out, in] is the base's weight, ``A`` [rank, in]
and ``B`` [out, rank] are the adapter's, and ``s = alpha / rank``. What leaves the trainer under a
checkpoint's names is ``W + s B A``, so that every engine loads it as any other weight.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from any_agent.engine.embedded.weight_loading import weight_files
from any_agent.engine.weight_serialization import checksum
from any_agent.errors import ConfigError
from any_agent.launcher.trial import require_peft
from any_agent.rundir.checksums import file_checksums

log = logging.getLogger(__name__)

NAME = "default"
"""The adapter's name in the model."""
_OF_EXPERTS = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
"""Names by which peft means stacked experts, which are no linear layers, too."""


@dataclass(frozen=True, slots=True)
class Lora:
    """An adapter's settings. ``targets`` are names of layers, or their ends; empty: every linear
    layer of the decoder. ``seed`` decides on the initial ``A``; ``B`` is zero at first."""

    rank: int = 16
    alpha: int = 32
    targets: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class BaseWeights:
    """The files of a model's weights, by which it is recognised."""

    path: str
    crc32: Mapping[str, str]
    """Checksums by the files' names."""

    @classmethod
    def of(cls, source: str | Path) -> BaseWeights:
        """Read the weights of a local folder, or of a hub name's cached copy."""
        path = str(Path(source).absolute() if Path(source).is_dir() else source)
        files = _files_of(path)
        names = [file.name for file in files]
        return cls(path, dict(zip(names, file_checksums(files), strict=True)))

    def checksums(self, dtype: torch.dtype) -> dict[str, str]:
        """Return the checksum of each tensor in an engine's type, by its name in the files."""
        sums = {}
        for file in _files_of(self.path):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no mapping
                    tensor = opened.get_tensor(name)
                    cast = tensor.to(dtype) if tensor.is_floating_point() else tensor
                    sums[name] = checksum(cast)
        return sums

    def is_at(self, path: str) -> bool:
        """Return True if a path, or a hub name, is where these weights were read."""
        return self.path in (path, str(Path(path).absolute()))

    def require_same(self, saved: Mapping[str, Any], what: str) -> None:
        """Raise ConfigError where a record, read from JSON, is of other weights.

        The message begins with ``what`` has or had them.
        """
        if wrong := sorted({name for name, _ in saved["crc32"].items() ^ self.crc32.items()}):
            raise ConfigError(
                f"{what} other weights ({saved['path']}) than those of {self.path}: "
                f"{', '.join(wrong)} differ; restore them, or choose another --trial"
            )


def _files_of(path: str) -> list[Path]:
    """Return the files of weights in a local folder, or in a hub name's cached copy."""
    folder = Path(path)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        patterns = ["*.safetensors", "*.json"]
        folder = Path(snapshot_download(path, allow_patterns=patterns, local_files_only=True))
    return weight_files(folder)


def add_adapter(model: Any, lora: Lora) -> None:
    """Freeze a transformers model, and put an adapter into it that changes nothing yet.

    The model keeps its class. Raises ConfigError for targets that it lacks.
    """
    require_peft()
    import peft

    targets = _targets(model, lora.targets)
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        bias="none",
        target_modules=list(lora.targets) or sorted({n.rpartition(".")[2] for n in targets}),
        task_type="CAUSAL_LM",
        # Drawn below, from the adapter's own seed.
        init_lora_weights=False,
    )
    try:
        peft.inject_adapter_in_model(config, model, NAME)
    except ValueError as error:
        name = type(model).__name__
        raise ConfigError(
            f"train.lora.target_modules: peft cannot adapt these layers of {name}: {error}"
        ) from error
    if odd := layers(model).keys() ^ targets:
        raise ConfigError(
            f"train.lora.target_modules: peft does not adapt the linear layers of these names in "
            f"{type(model).__name__}, but others ({', '.join(sorted(odd)[:4])}): name other layers"
        )
    generator = torch.Generator().manual_seed(lora.seed)
    for layer in layers(model).values():
        nn.init.kaiming_uniform_(layer.lora_A[NAME].weight, a=math.sqrt(5), generator=generator)
        nn.init.zeros_(layer.lora_B[NAME].weight)
    count = sum(p.numel() for p in adapter_tensors(model).values())
    log.info("LoRA: %d parameters are trained, in %d layers", count, len(targets))


def _targets(model: Any, wanted: Sequence[str]) -> set[str]:
    """Return the names of the layers to adapt; ConfigError for a wanted name that fits none."""
    body = model.base_model
    own = {id(module) for module in body.modules() if isinstance(module, nn.Linear)}
    linear = [name for name, module in model.named_modules() if id(module) in own]
    kinds = {name.rpartition(".")[2] for name in linear}
    if not wanted:
        if any(p.ndim == 3 and "experts" in name for name, p in body.named_parameters()):
            kinds -= _OF_EXPERTS
        wanted = sorted(kinds)
    found = {end: [n for n in linear if f".{n}".endswith(f".{end}")] for end in wanted}
    if not kinds:
        raise ConfigError(f"{type(model).__name__} has no linear layers for a LoRA adapter")
    if missing := [end for end, names in found.items() if not names]:
        raise ConfigError(
            f"train.lora.target_modules: {type(model).__name__} has no linear layer "
            f"named {', '.join(missing)} in its decoder; it has {', '.join(sorted(kinds))}"
        )
    return {name for names in found.values() for name in names}


def layers(model: Any) -> dict[str, Any]:
    """Return the adapted layers by their names; {} for a model without an adapter."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def adapter_tensors(model: Any) -> dict[str, Tensor]:
    """Return the adapter's parameters by the model's names; shards if it is sharded."""
    return {
        f"{name}.{part}.{NAME}.weight": getattr(layer, part)[NAME].weight
        for name, layer in layers(model).items()
        for part in ("lora_A", "lora_B")
    }


def without_adapter_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the base's tensors of a model's state by the names that they have without peft."""
    return {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in state.items()
        if ".lora_A." not in name and ".lora_B." not in name
    }


def merged(
    model: Any,
    stored: Mapping[str, Tensor],
    names: Sequence[str],
    whole: Callable[[Tensor], Tensor],
) -> list[Tensor]:
    """Return tensors by their names in a checkpoint, with the adapter added, or the adapter's own.

    ``whole`` returns a stored tensor as one. Sums are computed in float32 at least, one tensor
    after the other; no more than the asked ones are in memory.
    """
    adapted = layers(model)
    every = {**stored, **adapter_tensors(model)}
    out = []
    for name in names:
        tensor = whole(every[name])
        layer = adapted.get(name.removesuffix(".weight"))
        if layer is not None and name.endswith(".weight"):
            exact = torch.promote_types(tensor.dtype, torch.float32)
            a, b = (whole(part[NAME].weight).to(exact) for part in (layer.lora_A, layer.lora_B))
            tensor = torch.addmm(tensor.to(exact), b, a, alpha=layer.scaling[NAME])
        out.append(tensor)
    return out


@contextmanager
def switched_off(model: Any) -> Iterator[None]:
    """Let the model compute what its base computes, bit for bit."""
    adapted = layers(model).values()
    for layer in adapted:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in adapted:
            layer.enable_adapters(True)
