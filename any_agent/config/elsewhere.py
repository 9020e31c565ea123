"""What settings of other trainers are called here: whoever brings a file along is told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_SESSIONS = "rollout.batch_size, which counts sessions: items times sessions.group_size"
CALLED_HERE: Mapping[str, str] = {
    "experiment_name": "experiment",
    "trial_name": "trial",
    "seed": "train.seed",
    "tokenizer_path": "model.path",
    "actor.path": "model.path",
    "actor.optimizer.lr": "train.lr",
    "actor.optimizer.weight_decay": "train.weight_decay",
    "actor.gradient_clipping": "train.grad_clip",
    "actor.group_size": "sessions.group_size",
    "actor.eps_clip": "train.eps_low and train.eps_high",
    "actor.kl_ctl": "train.kl_coef",
    "actor.temperature": "sampling.temperature",
    "gconfig.n_samples": "sessions.group_size",
    "gconfig.max_new_tokens": "sampling.max_new_tokens",
    "gconfig.temperature": "sampling.temperature",
    "total_train_epochs": "train.epochs",
    "total_train_steps": "train.steps",
    "train_dataset.batch_size": _SESSIONS,
    "rollout.consumer_batch_size": _SESSIONS,
    "rollout.group_size": "sessions.group_size",
    "rollout.max_concurrent_rollouts": "rollout.max_concurrent",
    "rollout.max_head_offpolicyness": "rollout.eta",
    "rollout.tokenizer_path": "model.path",
    "rollout.agent.turn_discount": "train.discount",
    "rollout.agent.subproc_max_workers": "rollout.agent.max_workers",
    "rollout.agent.admin_api_key": "server.admin_key",
    "rollout.agent.session_timeout_seconds": "sessions.ttl",
    "evaluator.freq_steps": "eval.every",
    "evaluator.eval_before_train": "eval.at_start",
    "saver.freq_steps": "train.checkpoint_every",
    "recover.freq_steps": "train.checkpoint_every",
    "cluster.fileroot": "root",
    "cluster.n_nodes": "cluster.nodes",
    "cluster.n_gpus_per_node": "cluster.gpus_per_node",
    "sglang.context_length": "engine.context_length",
    "lr": "train.lr",
    "learning_rate": "train.lr",
    "optimizer.lr": "train.lr",
    "train.learning_rate": "train.lr",
    "train.optimizer.lr": "train.lr",
    "max_steps": "train.steps",
    "total_steps": "train.steps",
    "train.max_steps": "train.steps",
    "train.num_steps": "train.steps",
    "train.total_steps": "train.steps",
    "train.total_train_steps": "train.steps",
    "num_epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "train.num_epochs": "train.epochs",
    "train.num_train_epochs": "train.epochs",
    "train.total_epochs": "train.epochs",
    "train.total_train_epochs": "train.epochs",
    "train.batch_size": _SESSIONS,
    "train.group_size": "sessions.group_size",
    "train.num_generations": "sessions.group_size",
    "train.max_grad_norm": "train.grad_clip",
    "train.temperature": "sampling.temperature",
    "train.max_new_tokens": "sampling.max_new_tokens",
    "train.save_steps": "train.checkpoint_every",
    "train.eval_steps": "eval.every",
    "model.name_or_path": "model.path",
    "model_name_or_path": "model.path",
}
"""AReaL's names and other usual ones, and ours."""
_NAMED_IN_SCRIPT = (
    "name it in trainer.train({0}=...), or declare it as a field of your config class: "
    "class MyConfig(GRPOConfig): {0}: str = ''"
)
NOT_HERE: Mapping[str, str] = {
    "scheduler": "leave it out: a script starts its service on this machine, or in a Slurm job",
    "allocation_mode": "leave it out: server.ranks says how many engines there are",
    "rollout.backend": "leave it out: engine.urls names engines that run already, else ours start",
    "actor.backend": "leave it out: the trainer has one",
    "stats_logger": "leave it out: every step is a line of the run's metrics.jsonl, and /metrics",
    "train_dataset.type": "leave it out: all data is for reinforcement learning",
    "valid_dataset.type": "leave it out: all data is for reinforcement learning",
    "workflow": _NAMED_IN_SCRIPT.format("workflow"),
    "eval_workflow": _NAMED_IN_SCRIPT.format("eval_workflow"),
}
"""AReaL's settings and sections that nothing here corresponds to, and what to do."""


def called_here(key: str, value: Any) -> list[str]:
    """Lines about an unknown setting, or a section of them, that is another one here, or none."""
    lines = []
    for name in _leaves(key, value):
        reason = next(
            (text for part, text in NOT_HERE.items() if f"{name}.".startswith(f"{part}.")), None
        )
        if name in CALLED_HERE:
            lines.append(f"  unknown key {name}: here it is {CALLED_HERE[name]}")
        elif reason is not None:
            lines.append(f"  unknown key {name}: {reason}")
    return lines


def _leaves(key: str, value: Any) -> Iterator[str]:
    if not isinstance(value, Mapping):
        yield key
        return
    for name, part in value.items():
        yield from _leaves(f"{key}.{name}", part)
