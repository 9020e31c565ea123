"""Training: the loop, the algorithms, and the trainer for a researcher's script."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
    try:
        return getattr(import_module(f"trainer.{_MODULES.get(name, 'grpo_trainer')}"), name)
    except ModuleNotFoundError:
        from any_agent.runtime.command_line import one_line_errors

        one_line_errors()
        raise
