"""Training: the loop, the algorithm, and what a researcher's script calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.grpo_trainer import GRPOTrainer, PPOTrainer

__all__ = ["GRPOTrainer", "PPOTrainer"]


def __getattr__(name: str) -> Any:
    """Import them when they are used: they bring torch."""
    if name not in __all__:
        raise AttributeError(f"module 'trainer' has no attribute {name!r}")
    from trainer import grpo_trainer

    return getattr(grpo_trainer, name)
