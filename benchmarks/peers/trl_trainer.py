"""TRL's GRPOTrainer made without its constructor, on completions that are given.

Its own padding, scoring pass and loss run; only generation and rewards are replaced.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Completions:
    """Prompts and outputs as token ids, in the order of their groups; one entry for each."""

    prompts: Sequence[list[int]]
    outputs: Sequence[list[int]]
    own: Sequence[list[int]]
    """1 for each token of an output that the model sampled, 0 for a tool's."""
    behaviour: Sequence[list[float]]
    """The log-probabilities that vLLM would report, nats."""
    rewards: Tensor
    """Shape [n]."""


def trl_trainer(
    model: Any,
    given: Completions,
    *,
    group: int,
    each: int,
    kind: type | None = None,
    **changes: Any,
) -> Any:
    """Return a trainer, by default GRPO's, with just what scoring and the loss read.

    By default its loss is ours: ``loss_type="dapo"``, clipped at 0.2 and 0.28, with importance
    weights of tokens truncated at 5. ``each`` is the number of rows in a pass; ``changes`` are
    attributes, and those of its ``args`` by the names of ``GRPOConfig``.
    """
    from trl.trainer.grpo_trainer import GRPOTrainer

    identity = SimpleNamespace(
        device=torch.device("cpu"),
        num_processes=1,
        process_index=0,
        sync_gradients=True,
        is_main_process=True,
        autocast=contextlib.nullcontext,
        gather=lambda t: t,
        pad_across_processes=lambda t, **_: t,
        gather_for_metrics=lambda t: t,
        reduce=lambda t, reduction: t,
        unwrap_model=lambda m: m,
    )
    args: dict[str, Any] = {
        "steps_per_generation": 1,
        "gradient_accumulation_steps": 1,
        "per_device_train_batch_size": each,
        "per_device_eval_batch_size": each,
        "report_to": [],
        "gradient_checkpointing_kwargs": None,
        "use_bias_correction_kl": False,
        "delta": None,
    }
    settings: dict[str, Any] = {
        "accelerator": identity,
        "model": model,
        "ref_model": None,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "epsilon_low": 0.2,
        "epsilon_high": 0.28,
        "beta": 0.0,
        "num_iterations": 1,
        "num_generations": group,
        "importance_sampling_level": "token",
        "use_vllm": True,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": 5.0,
        "vllm_importance_sampling_clip_min": None,
        "off_policy_mask_threshold": None,
        "top_entropy_quantile": 1.0,
        "aux_loss_enabled": False,
        "_entropy_bonus_enabled": False,
        "entropy_coef": 0.0,
        "max_completion_length": 0,
        "use_adaptive_entropy": False,
        "current_gradient_accumulation_steps": 1,
        "multi_objective_aggregation": "sum_then_normalize",
        "mask_truncated_completions": False,
        "normalize_advantages": False,
        "reward_clip_range": None,
        "pad_to_multiple_of": None,
        "environment_factories": None,
        "environments": None,
        "tools": None,
        "_is_vlm": False,
        "_tokenizer": SimpleNamespace(pad_token_id=0),
        "eos_token_ids": [2],
        "reward_func_names": ["reward"],
        "reward_weights": torch.ones(1, dtype=given.rewards.dtype),
        "_metrics": {"train": defaultdict(list)},
        "_logs": defaultdict(lambda: defaultdict(list))
        | {"prompt": [], "completion": [], "advantages": []},
        "_pending_extra_logs": {},
        "_pending_metrics": {},
        "log_multimodal": False,
    }
    own = {name: changes.pop(name) for name in list(changes) if name not in settings}
    kind = kind or GRPOTrainer
    trainer: Any = kind.__new__(kind)
    for name, value in (settings | changes | {"args": SimpleNamespace(**args | own)}).items():
        setattr(trainer, name, value)
    trainer._generate = lambda _: (
        given.prompts,
        given.outputs,
        given.own,
        [""] * len(given.prompts),
        given.behaviour,
        {},
        None,
        None,
    )
    trainer._calculate_rewards = lambda *_: given.rewards[:, None]
    return trainer
