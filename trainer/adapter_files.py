"""An adapter's files in a checkpoint, and what a resume must find again.

The folder `adapter` is as peft writes it: `PeftModel.from_pretrained` loads it onto the base model.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from any_agent.errors import ConfigError
from trainer.lora import NAME, Lora, adapter_tensors, layers
from trainer.policy import Policy
from trainer.sharded_optimizer import load_shards

FOLDER = "adapter"
"""The adapter's folder in a checkpoint."""
_PREFIX = "base_model.model."
"""Begins every name in peft's files."""


def save_adapter(policy: Policy, folder: Path) -> None:
    """Write the adapter into a new folder as peft does, for ``PeftModel.from_pretrained``."""
    folder.mkdir()
    names = list(adapter_tensors(policy.model))
    with policy.commanded({"do": "gather", "names": names}):
        tensors = policy.gathered(names)
    named = {_in_file(n): t.cpu().contiguous() for n, t in zip(names, tensors, strict=True)}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = copy(policy.model.peft_config[NAME])
    config.base_model_name_or_path = policy.base.path if policy.base is not None else None
    config.target_modules = sorted(config.target_modules)
    config.init_lora_weights = True
    config.inference_mode = True
    config.save_pretrained(str(folder))


def load_adapter(policy: Policy, folder: Path) -> None:
    """Read the adapter's tensors, or this process's shares of them."""
    tensors = {_in_file(n): p.detach() for n, p in adapter_tensors(policy.model).items()}
    load_shards(folder, tensors, "the adapter")


def _in_file(name: str) -> str:
    return _PREFIX + name.replace(f".{NAME}.", ".")


def record(policy: Policy) -> dict[str, Any] | None:
    """Return what a resume must find again, as JSON; None for a policy without an adapter."""
    lora = policy.config.lora
    if lora is None:
        return None
    return {
        "rank": lora.rank,
        "alpha": lora.alpha,
        "target_modules": sorted(layers(policy.model)),
        "base": None if policy.base is None else asdict(policy.base),
    }


def require_same_settings(
    path: Path | str, saved: Mapping[str, Any] | None, lora: Lora | None
) -> None:
    """Raise ConfigError unless a checkpoint, whose record is ``saved``, continues with ``lora``."""
    if saved is None and lora is None:
        return
    new = "or choose another --trial"
    if saved is None:
        raise ConfigError(
            f"{path} was trained without LoRA, and train.lora is set: leave it out, {new}"
        )
    if lora is None:
        raise ConfigError(
            f"{path} is the training of a LoRA adapter: set train.lora.rank={saved['rank']} and "
            f"train.lora.alpha={saved['alpha']}, {new}"
        )
    for name, now in (("rank", lora.rank), ("alpha", lora.alpha)):
        if saved[name] != now:
            raise ConfigError(
                f"{path} is the training of a LoRA adapter with {name} {saved[name]}, and "
                f"train.lora.{name}={now}: set train.lora.{name}={saved[name]}, {new}"
            )


def require_same_model(path: Path | str, saved: Mapping[str, Any], policy: Policy) -> None:
    """Raise ConfigError unless the policy has the checkpoint's base and adapts the same layers."""
    now = record(policy)
    assert now is not None
    if odd := set(saved["target_modules"]) ^ set(now["target_modules"]):
        raise ConfigError(
            f"{path} is the training of a LoRA adapter of other layers than those of "
            f"train.lora.target_modules: they differ in {', '.join(sorted(odd)[:4])}; set it as it "
            "was, or choose another --trial"
        )
    if saved["base"] is not None and policy.base is not None:
        policy.base.require_same(saved["base"], f"{path} is the training of a LoRA adapter on")
