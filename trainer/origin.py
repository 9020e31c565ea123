"""Recognise what a run began with, when its steps before the first checkpoint are repeated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from any_agent.errors import ConfigError
from trainer.adapter_files import record, require_same_model, require_same_settings
from trainer.lora import BaseWeights
from trainer.policy import Policy


def origin_of(policy: Policy, model: str, seed: int) -> dict[str, Any]:
    """Return, as JSON, what a policy that was loaded from ``model`` begins with."""
    weights = policy.base or BaseWeights.of(model)
    return {"seed": seed, "weights": asdict(weights), "adapter": record(policy)}


def require_same_origin(
    where: str, saved: Mapping[str, Any], now: Mapping[str, Any], policy: Policy
) -> None:
    """Raise ConfigError unless a step, whose record is ``saved``, can be repeated from ``now``."""
    require_same_settings(where, saved["adapter"], policy.config.lora)
    if saved["adapter"] is not None:
        require_same_model(where, saved["adapter"], policy)
    weights = BaseWeights(**now["weights"])
    if wrong := weights.differing(saved["weights"]):
        raise ConfigError(
            f"{where} was trained from other weights ({saved['weights']['path']}) than those of "
            f"{weights.path}: {', '.join(wrong)} differ; restore them, or choose another --trial"
        )
    if saved["seed"] != now["seed"]:
        raise ConfigError(
            f"{where} was trained with train.seed={saved['seed']}, and train.seed={now['seed']}: "
            f"set train.seed={saved['seed']}, or choose another --trial"
        )
