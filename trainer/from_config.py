"""A run's settings as the policy, the loss and the random generators take them."""

from __future__ import annotations

import logging
import random
from dataclasses import asdict, replace

import numpy as np
import torch

from any_agent.config import Config, TrainConfig
from any_agent.errors import ConfigError
from any_agent.workflow import WorkflowLike
from trainer.loss import LossConfig, preset
from trainer.policy import Policy, PolicyConfig

log = logging.getLogger(__name__)


def chosen_workflow(
    config: Config, setting: str, given: WorkflowLike | None
) -> WorkflowLike | None:
    """Return what a script gives, else what settings name; ConfigError for two that differ."""
    named: str = getattr(config, setting, "")
    if given is None or not named:
        return named or None if given is None else given
    kind = given if isinstance(given, type) else type(given)
    called = given if isinstance(given, str) else f"{kind.__module__}.{kind.__qualname__}"
    if called != named:
        raise ConfigError(
            f"the script trains {setting}={called}, and its settings say {setting}={named}: leave "
            f"the setting out, or have the script call trainer.train() without {setting}"
        )
    return given


def loss_config(c: TrainConfig) -> LossConfig:
    """The preset's loss with the run's constants."""
    chosen = replace(preset(c.preset).loss, eps_low=c.eps_low, eps_high=c.eps_high, is_cap=c.is_cap)
    log.debug("loss: %s", asdict(chosen))
    return chosen


def policy_config(c: TrainConfig) -> PolicyConfig:
    """Optimizer and device; ConfigError for a device that is not there."""
    device = _device(c.device)
    return PolicyConfig(
        lr=c.lr,
        betas=c.betas,
        weight_decay=c.weight_decay,
        grad_clip=c.grad_clip,
        gradient_checkpointing=c.gradient_checkpointing,
        dtype=_dtype(c.dtype, device),
        offload=c.offload_optimizer,
        device=device,
        threads=c.threads if device == "cpu" else None,
    )


def set_optimizer(policy: Policy, c: TrainConfig) -> None:
    """The optimizer's state goes on; its settings are those of this start."""
    for group in policy.optimizer.param_groups:
        group.update(lr=c.lr, betas=c.betas, weight_decay=c.weight_decay)


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def _dtype(wanted: str, device: str) -> torch.dtype | None:
    """What passes compute in; None: float32, as the weights."""
    if wanted == "auto":
        wanted = "bfloat16" if device == "cuda" else "float32"
    return torch.bfloat16 if wanted == "bfloat16" else None


def _device(wanted: str) -> str:
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("train.device=cuda, but there is no CUDA device; use cpu or auto")
    return wanted
