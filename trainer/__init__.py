"""Training: the loop, the algorithms, and the trainer for a researcher's script."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from any_agent.runtime.public_names import public_name

if TYPE_CHECKING:
    from trainer.advantage import register_advantage_estimator
    from trainer.grpo_trainer import GRPOTrainer, PPOTrainer
    from trainer.loss import register_loss

__all__ = ["GRPOTrainer", "PPOTrainer", "register_advantage_estimator", "register_loss"]
_MODULES = {"register_advantage_estimator": "advantage", "register_loss": "loss"}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: most of them bring torch."""
    if name not in __all__:
        raise AttributeError(f"module 'trainer' has no attribute {name!r}")
    return public_name(f"trainer.{_MODULES.get(name, 'grpo_trainer')}", name)
