"""The parts of a trainer, made from the run's configuration."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from any_agent import load_hf_tokenizer
from any_agent.auth.access import signer_of
from any_agent.auth.engine_key import key_of_engines
from any_agent.config import Config, TrainConfig
from any_agent.config.script import sampling_of
from any_agent.engine import EnginePool
from any_agent.errors import ConfigError
from any_agent.launcher.trial import require_peft
from any_agent.rollout import WorkflowExecutor
from any_agent.rundir.layout import RunDir
from any_agent.workflow import WorkflowLike
from any_agent.workflow.dump import TrajectoryDump
from any_agent.workflow.openai_proxy import AgentService
from trainer.advantage import ESTIMATORS
from trainer.lora import Lora
from trainer.loss import LOSSES, LossConfig, PolicyLoss
from trainer.manifests import SETTINGS
from trainer.model import PolicyConfig
from trainer.weight_folders import tokenizer_of

log = logging.getLogger(__name__)


def chosen_workflow(
    config: Config, setting: str, given: WorkflowLike | None
) -> WorkflowLike | None:
    """Return the workflow that a script passes, else the one that the settings name.

    Raises ConfigError if these are two different ones.
    """
    named: str = getattr(config, setting, "")
    if given is None or not named:
        return named or None if given is None else given
    kind = given if isinstance(given, type) else type(given)
    called = given if isinstance(given, str) else f"{kind.__module__}.{kind.__qualname__}"
    if called != named:
        raise ConfigError(
            f"the script trains {setting}={called}, but its settings name {setting}={named}: leave "
            f"the setting out, or have the script call trainer.train() without {setting}"
        )
    return given


def require_algorithm(c: TrainConfig) -> None:
    """Raise ConfigError, with the known names, for an unknown estimator or loss, and for a bound of
    rows with a loss that does not keep it."""
    ESTIMATORS.find(c.advantage_estimator)
    if isinstance(LOSSES.find(c.loss), PolicyLoss):
        return
    for name in ("rejection_k1", "rejection_k2", "rejection_k3"):
        if getattr(c, name) is not None:
            raise ConfigError(
                f"train.{name} leaves rows out of the losses that PolicyLoss makes, and train.loss="
                f"{c.loss} is another one: leave it out, or make the loss a PolicyLoss"
            )


def loss_config(c: TrainConfig) -> LossConfig:
    """Return the run's loss and its constants; raises as :func:`require_algorithm`."""
    require_algorithm(c)
    names = (f.name for f in fields(LossConfig) if f.name != "name")
    given = {name: value for name in names if (value := getattr(c, name)) is not None}
    chosen = LossConfig(c.loss, **given)
    log.debug("loss: %s", asdict(chosen))
    return chosen


def policy_config(c: TrainConfig) -> PolicyConfig:
    """Return optimizer and device settings; ConfigError for a device or package that is missing."""
    device = _device(c.device)
    bfloat16 = c.dtype == "bfloat16" or (c.dtype == "auto" and device == "cuda")
    return PolicyConfig(
        lr=c.lr,
        betas=c.betas,
        weight_decay=c.weight_decay,
        grad_clip=c.grad_clip,
        packing=c.packing,
        gradient_checkpointing=c.gradient_checkpointing,
        dtype=torch.bfloat16 if bfloat16 else None,  # None: float32, like the weights
        compile=device != "cpu" if c.compile is None else c.compile,
        offload=c.offload_optimizer,
        device=device,
        threads=c.threads if device == "cpu" else None,
        lora=_lora(c),
    )


def _lora(c: TrainConfig) -> Lora | None:
    if c.lora is None:
        return None
    require_peft()
    return Lora(c.lora.rank, c.lora.alpha, c.lora.target_modules, c.seed)


def learning_rate(c: TrainConfig, step: int, steps: int) -> float:
    """Return the learning rate of one of ``steps``, counted from 1.

    It depends on nothing else. In the W steps of the warm-up it is ``lr * step / (W + 1)``, then
    ``lr * (r + (1 - r) * f(p))`` with r the least ratio, ``p = (step - 1 - W) / (steps - W)``, and
    ``f(p) = 1 - p`` (linear) or ``(1 + cos(pi p)) / 2`` (cosine, arXiv 1608.03983).
    """
    if step <= c.warmup_steps:
        return c.lr * step / (c.warmup_steps + 1)
    p = min((step - 1 - c.warmup_steps) / max(steps - c.warmup_steps, 1), 1.0)
    left = {"constant": 1.0, "linear": 1 - p, "cosine": (1 + math.cos(math.pi * p)) / 2}
    return c.lr * (c.min_lr_ratio + (1 - c.min_lr_ratio) * left[c.lr_schedule])


def require_warm_up(c: TrainConfig, steps: int) -> None:
    """Raise ConfigError for a warm-up as long as all the steps."""
    if c.warmup_steps >= steps:
        raise ConfigError(
            f"train.warmup_steps={c.warmup_steps} must be below the {steps} steps that the data "
            "make: the learning rate would never reach train.lr"
        )


def step_settings(c: TrainConfig, step: int, steps: int) -> dict[str, Any]:
    """Return the settings that decide what one of ``steps`` does, with the loss's own constants."""
    found = {name: getattr(c, name) for name in SETTINGS} | asdict(loss_config(c))
    del found["name"]
    return found | {"lr": learning_rate(c, step, steps)}


def seed_all(seed: int) -> None:
    """Seed the generators of torch, numpy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def agent_service(c: Config, run_dir: RunDir, url: str) -> AgentService:
    """Return the service for agents' calls; its key is the run's current own key."""
    signer = signer_of(run_dir)
    return AgentService(
        url,
        lambda: signer.run_key,
        mode=c.rollout.agent.mode,
        export_style=c.rollout.agent.export_style,
        discount=c.train.discount,
        max_workers=c.rollout.agent.max_workers,
        timeout=c.rollout.agent.timeout,
    )


def workflow_executor(c: Config, engine_urls: Sequence[str]) -> WorkflowExecutor:
    """Return the executor of resolved workflows on running engines, not started yet."""
    tokenizer = load_hf_tokenizer(str(tokenizer_of(c.model.path)))
    pool = EnginePool(
        engine_urls,
        kind=c.engine.kind,
        decode=tokenizer.decode,
        update_mode=c.engine.update_mode,
        update_wait=c.engine.update_wait,
        request_timeout=c.engine.request_timeout,
        key=key_of_engines(c),
    )
    return WorkflowExecutor(
        pool,
        c.rollout,
        sampling=sampling_of(c),
        eval_sampling=sampling_of(c, c.eval.temperature),
        dump=TrajectoryDump.of(c, dump_tokenizer(c, tokenizer).decode),
        timeout=c.sessions.ttl,
        discount=c.train.discount,
        vocab_size=AutoConfig.from_pretrained(c.model.path).get_text_config().vocab_size,
        seed=c.train.seed,
    )


def dump_tokenizer(c: Config, tokenizer: Any) -> Any:
    """Return the tokenizer of dumped episodes; ``tokenizer`` is the model's own."""
    if not (c.rollout.tokenizer_path and c.rollout.dump_to_file):
        return tokenizer
    return load_hf_tokenizer(c.rollout.tokenizer_path)


def _device(wanted: str) -> str:
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("train.device=cuda, but there is no CUDA device; use cpu or auto")
    return wanted
