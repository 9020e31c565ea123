"""Settings under AReaL's names: accepted if they mean the same, else refused with ours."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextvars import ContextVar
from typing import Any

from any_agent.errors import ConfigError

SCHEDULER: ContextVar[str] = ContextVar("scheduler", default="local")
"""The value of `scheduler.type` that describes the running launcher."""

_NAMES: Mapping[str, str] = {
    "experiment": "experiment_name actor.experiment_name rollout.experiment_name",
    "trial": "trial_name actor.trial_name rollout.trial_name",
    "root": "cluster.fileroot",
    "cluster.nodes": "cluster.n_nodes",
    "cluster.gpus_per_node": "cluster.n_gpus_per_node",
    "model.path": "actor.path",
    "train.gradient_checkpointing": "actor.gradient_checkpointing",
    "train.grad_clip": "actor.gradient_clipping actor.optimizer.gradient_clipping",
    "train.lr": "actor.optimizer.lr",
    "train.lr_schedule": "actor.optimizer.lr_scheduler_type",
    "train.min_lr_ratio": "actor.optimizer.min_lr_ratio",
    "train.minibatches": "actor.ppo_n_minibatches",
    "train.weight_decay": "actor.optimizer.weight_decay",
    "sessions.group_size": "actor.group_size gconfig.n_samples rollout.group_size",
    "sampling.temperature": "actor.temperature gconfig.temperature",
    "sampling.top_p": "gconfig.top_p",
    "sampling.top_k": "gconfig.top_k",
    "sampling.max_new_tokens": "gconfig.max_new_tokens",
    "rollout.max_concurrent": "rollout.max_concurrent_rollouts",
    "rollout.eta": "rollout.max_head_offpolicyness",
    "rollout.agent.max_workers": (
        "rollout.agent.subproc_max_workers rollout.openai.subproc_max_workers"
    ),
    "train.discount": "rollout.agent.turn_discount rollout.openai.turn_discount",
    "rollout.agent.mode": "rollout.openai.mode",
    "rollout.agent.export_style": "rollout.openai.export_style",
    "train.seed": "seed",
    "train.steps": "total_train_steps",
    "eval.every": "evaluator.freq_steps",
    "eval.at_start": "evaluator.eval_before_train",
    "engine.context_length": "sglang.context_length",
}
ALIASES: Mapping[str, str] = {
    theirs: here for here, names in _NAMES.items() for theirs in names.split()
}
"""Names that are accepted, and the settings that they set."""

_OTHER_NAMES: Mapping[str, str] = {
    "train.eps_low and train.eps_high": "actor.eps_clip train.epsilon train.eps_clip",
    "train.eps_high": "actor.eps_clip_higher train.epsilon_high",
    "train.is_cap; train.is_mode=mask drops the tokens above it": "actor.behav_imp_weight_cap",
    "train.preset, or train.loss and train.aggregation by themselves": (
        "train.algorithm train.loss_type train.loss_mode"
    ),
    "train.preset=gspo for ratios of sequences": "train.importance_sampling_level",
    "train.aggregation": "train.loss_agg_mode",
    "train.advantage_estimator": "train.adv_estimator algorithm.adv_estimator",
    "train.normalize_std": (
        "train.scale_rewards actor.adv_norm.std_level algorithm.norm_adv_by_std_in_grpo"
    ),
    "train.kl_coef, a term of the loss; train.kl_reward_coef is for the reward": (
        "train.beta train.kl_loss_coef"
    ),
    "train.kl_reward_coef": "train.kl_ctl train.use_kl_in_reward algorithm.use_kl_in_reward",
    "train.dual_clip": "train.delta train.clip_ratio_c",
    "train.top_entropy": "train.top_entropy_quantile",
    "train.is_floor": "train.vllm_importance_sampling_clip_min",
    "train.off_policy_threshold": "train.off_policy_mask_threshold",
    "train.second_moment": "actor.m2_threshold",
    "train.mask_truncated": "train.mask_truncated_completions",
    "train.rejection_k1, train.rejection_k2 or train.rejection_k3": (
        "algorithm.rollout_correction.rollout_rs algorithm.rollout_correction.rollout_rs_threshold"
    ),
    "train.kl_estimator": "train.kl_loss_type",
    "train.entropy_coef": "train.entropy_coeff actor.entropy_coeff",
    "train.overlong_length": "actor.overlong_reward_penalty",
    "train.overlong_buffer": "actor.overlong_tokens",
    "train.overlong_penalty": "actor.overlong_penalty_factor",
    "sampling.max_new_tokens": "actor.max_new_tokens train.max_new_tokens",
    "sampling.temperature": "train.temperature",
    "train.micro_batch_tokens": "actor.mb_spec.max_tokens_per_mb",
    "train.epochs_per_batch": "train.num_iterations train.ppo_epochs",
    "train.lr_schedule": "train.lr_scheduler train.lr_scheduler_type",
    "train.warmup_steps": "train.lr_warmup_steps train.num_warmup_steps",
    "train.minibatches": "train.n_minibatches train.ppo_n_minibatches",
    "train.reference_model": "train.ref_model",
    "train.betas": "actor.optimizer.beta1 actor.optimizer.beta2",
    "train.dtype": "actor.dtype",
    "train.grad_clip": "train.max_grad_norm",
    "train.lora.rank, which switches LoRA on": "actor.lora_rank train.lora.r train.lora_rank",
    "train.lora.alpha": "actor.lora_alpha train.lora.lora_alpha train.lora_alpha",
    "train.lora.target_modules": "actor.target_modules train.target_modules",
    "train.lora.dropout, and only 0 is accepted": "train.lora.lora_dropout",
    "train.lr": "lr learning_rate optimizer.lr train.learning_rate train.optimizer.lr",
    "train.steps": (
        "max_steps total_steps train.max_steps train.num_steps train.total_steps "
        "train.total_train_steps"
    ),
    "train.epochs; train.steps (100 unless it is set) ends training, too": "total_train_epochs",
    "train.epochs": (
        "num_epochs num_train_epochs train.num_epochs train.num_train_epochs train.total_epochs "
        "train.total_train_epochs"
    ),
    "rollout.batch_size, which counts sessions: items times sessions.group_size": (
        "train_dataset.batch_size rollout.consumer_batch_size train.batch_size"
    ),
    "sessions.group_size": "train.group_size train.num_generations",
    "sessions.ttl and sessions.idle_timeout": "rollout.agent.session_timeout_seconds",
    "server.admin_key": "rollout.agent.admin_api_key",
    "train.checkpoint_every; train.keep_checkpoints sets how many are kept": (
        "saver.freq_steps recover.freq_steps"
    ),
    "train.checkpoint_every": "train.save_steps",
    "eval.every": "train.eval_steps",
    "model.path": "model.name_or_path model_name_or_path",
}
CALLED_HERE: Mapping[str, str] = {
    theirs: here for here, names in _OTHER_NAMES.items() for theirs in names.split()
}
"""Other names of AReaL, and usual ones, with ours, which mean something slightly different."""

_NO_CRITIC = "leave it out: no algorithm here learns values, baselines are means of scores"
_NO_GAE = f"only 1 is supported: an answer's tokens share one advantage; {_NO_CRITIC}"
_NO_KL = "only 0 is supported here: set train.kl_reward_coef, for each output as a whole"
_NO_OTHER = "leave it out: train.preset chooses the algorithm, and this is none of them"
_SCRIPT = (
    "it is for a script with a dataset, such as examples/experimental/proxy/train.py, whose "
    "settings are a GRPOConfig; agents outside need none"
)
NEUTRAL: Mapping[str, tuple[tuple[object, ...], str]] = {
    "actor.kl_ctl": ((0,), _NO_KL),
    "actor.kl_estimator": (("k1",), "set train.kl_estimator, together with train.kl_coef"),
    "actor.gae_lambda": ((1,), _NO_GAE),
    "actor.discount": ((1,), _NO_GAE),
    "actor.reward_scaling": ((1,), "only 1 is supported: rewards are trained on as they are given"),
    "actor.reward_bias": ((0,), "only 0 is supported: rewards are trained on as they are given"),
    "actor.importance_sampling_level": (
        ("token",),
        "only token is supported here: train.preset=gspo has the ratio of a sequence",
    ),
    "actor.use_lora": (
        (False,),
        "set train.lora.rank, train.lora.alpha and train.lora.target_modules instead",
    ),
    "actor.peft_type": (("lora",), "only lora is supported"),
    "rollout.use_lora": ((False,), "leave it out: engines get the model with the adapter merged"),
    "train.lora.modules_to_save": (
        (),
        "leave it out: only the adapter is trained, no other weights",
    ),
    "actor.dynamic_sampling": (
        (),
        "set train.dynamic_sampling: drop for true, keep for false, or refill to fill the step",
    ),
    "actor.optimizer.type": (("adam", "adamw"), "only AdamW is supported"),
    "actor.optimizer.warmup_steps_proportion": (
        (0,),
        "only 0 is supported: train.warmup_steps is the number of these steps",
    ),
    "gconfig.greedy": ((False,), "only false is supported: greedy answers teach nothing"),
    "gconfig.min_new_tokens": ((0,), "only 0 is supported: a minimum bends the distribution"),
    "actor.c_clip": ((), "set train.dual_clip"),
    "actor.use_sapo_loss": ((False,), _NO_OTHER),
    "actor.use_m2po_loss": ((False,), "set train.preset=m2po"),
    "train_dataset.type": (("rl",), "leave it out: all data is for reinforcement learning"),
    "valid_dataset.type": (("rl",), "leave it out: all data is for reinforcement learning"),
    "critic": ((), _NO_CRITIC),
    "ref": (
        (),
        "leave it out: train.kl_coef above 0 loads train.reference_model, or else model.path, and "
        "computes it as the policy",
    ),
    "reward_model": ((), "leave it out: rewards are what agents, or reward functions, give"),
    "teacher": (
        (),
        "set train.teacher, with train.teacher_coef for the weight of the distillation and "
        "train.reward_coef for that of the reward",
    ),
}
"""Names that are accepted with these values (and null), which change nothing, and the advice about
another value."""

NOT_HERE: Mapping[str, str] = {
    "allocation_mode": "leave it out: server.ranks is the number of engines",
    "rollout.backend": "leave it out: engine.urls names engines that run already, else ours start",
    "actor.backend": "leave it out: the trainer has one",
    "stats_logger": "use tracking.to, with wandb, trackio or tensorboard",
    "workflow": _SCRIPT,
    "eval_workflow": _SCRIPT,
    **{name: what for name, (_, what) in NEUTRAL.items()},
}
"""AReaL's settings and sections without a counterpart, and the advice about them."""

SPECIAL = ("async_training", "scheduler.type", "tokenizer_path")
"""Names that repeat other settings; :func:`settle` compares them."""

_FOREIGN = {n.split(".")[0] for n in (*ALIASES, *CALLED_HERE, *NOT_HERE, *SPECIAL) if "." in n}


def ours(name: str, value: object, own: Callable[[str], bool]) -> str | None:
    """Return our name of a setting that may be AReaL's; None for a value that changes nothing.

    ``own`` returns whether a name is a setting of the script itself.
    """
    if own(name):
        return name
    if name in ALIASES:
        return None if value is None else ALIASES[name]
    if name in NEUTRAL and value in (None, *NEUTRAL[name][0]):
        return None
    return name


def is_taken(name: str) -> bool:
    """Return whether it is an accepted name of AReaL."""
    return name in ALIASES or name in NEUTRAL or name in SPECIAL


def translate(data: dict[str, Any], own: Callable[[str], bool]) -> None:
    """Move a file's settings from AReaL's names to ours.

    Raises ConfigError for a setting that has two names and two values.
    """
    given: dict[str, tuple[str, Any]] = {}
    for name in (*ALIASES, *NEUTRAL):
        there, value = _at(data, name)
        if not there or (here := ours(name, value, own)) == name:
            continue
        _drop(data, name)
        if here is not None:
            there, mine = _at(data, here)
            if there and here not in given:
                given[here] = (here, mine)
            once(given, here, name, value)
            put(data, here, value)


def once(given: dict[str, tuple[str, Any]], key: str, name: str, value: Any) -> None:
    """Record a setting's name and value; ConfigError for another name with another value."""
    before, other = given.setdefault(key, (name, value))
    if other != value and before != name:
        raise ConfigError(
            f"{before}={other} and {name}={value} are the same setting: leave one of them out"
        )
    given[key] = (name, value)


def settle(data: dict[str, Any], own: Callable[[str], bool]) -> None:
    """Remove the names that repeat other settings; ConfigError if they contradict them."""
    found: dict[str, Any] = {}
    for name in SPECIAL:
        there, value = _at(data, name)
        if there and not own(name):
            _drop(data, name)
            if value not in (None, ""):
                found[name] = value
    _settle_tokenizer(data, found.get("tokenizer_path"))
    _settle_async(data, found.get("async_training"))
    scheduler = found.get("scheduler.type", SCHEDULER.get())
    if scheduler != SCHEDULER.get():
        raise ConfigError(_other_scheduler(str(scheduler)))


def _settle_tokenizer(data: dict[str, Any], path: object) -> None:
    there, model = _at(data, "model.path")
    if path is None or not there or _same_folder(path) == _same_folder(model):
        return
    raise ConfigError(
        f"tokenizer_path={path} is not model.path={model}: a model is trained with its own "
        "tokenizer, whose ids its weights know; leave it out (rollout.tokenizer_path decodes "
        "dumped episodes)"
    )


def _settle_async(data: dict[str, Any], wanted: object) -> None:
    if wanted is None:
        return
    if not isinstance(wanted, bool):
        raise ConfigError(f"async_training is {wanted!r}: set true or false")
    there, eta = _at(data, "rollout.eta")
    if there and isinstance(eta, int) and wanted is not (eta > 0):
        raise ConfigError(
            f"async_training={str(wanted).lower()} and rollout.eta={eta} contradict each other: "
            "training is asynchronous if tokens may be older than 0 steps; leave one of them out"
        )
    if not wanted:
        put(data, "rollout.eta", 0)


def _other_scheduler(kind: str) -> str:
    if SCHEDULER.get() == "slurm":
        return f"scheduler.type={kind}: in Slurm's launcher set slurm, or leave it out"
    if kind == "slurm":
        return (
            "scheduler.type=slurm: `python3 -m any_agent.launcher.slurm any_agent_grpo.py --config "
            "FILE` submits a job; this command runs everything on this machine (local)"
        )
    return (
        f"scheduler.type={kind} is not known: a service runs on one machine (local), or on the "
        "nodes of a Slurm job (slurm)"
    )


def suggest_setting(key: str, value: Any) -> list[str]:
    """Return lines of advice about an unknown setting, or a section of them; perhaps none."""
    lines = []
    for name in _leaves(key, value):
        reason = next(
            (text for part, text in NOT_HERE.items() if f"{name}.".startswith(f"{part}.")), None
        )
        if name in CALLED_HERE:
            lines.append(f"  unknown key {name}: here it is {CALLED_HERE[name]}")
        elif reason is not None:
            lines.append(f"  unknown key {name}: {reason}")
        elif key in _FOREIGN:
            lines.append(f"  unknown key {name}: leave it out, nothing here corresponds to it")
    return lines


def _leaves(key: str, value: Any) -> Iterator[str]:
    if not isinstance(value, Mapping) or not value:
        yield key
        return
    for name, part in value.items():
        yield from _leaves(f"{key}.{name}", part)


def _at(data: Mapping[str, Any], name: str) -> tuple[bool, Any]:
    """Return whether a dotted name exists, and its value."""
    *sections, leaf = name.split(".")
    for section in sections:
        part = data.get(section)
        if not isinstance(part, Mapping):
            return False, None
        data = part
    return leaf in data, data.get(leaf)


def _drop(data: MutableMapping[str, Any], name: str) -> None:
    """Remove a dotted name, and sections that are empty then."""
    section, _, rest = name.partition(".")
    if not rest:
        del data[section]
        return
    _drop(data[section], rest)
    if not data[section]:
        del data[section]


def put(data: MutableMapping[str, Any], name: str, value: Any) -> None:
    """Set a dotted name; ConfigError where one of its sections is a value."""
    *sections, leaf = name.split(".")
    for section in sections:
        if data.get(section) is None:
            data[section] = {}
        part = data[section]
        if not isinstance(part, MutableMapping):
            raise ConfigError(f"{name}: {section} is a value, not a section")
        data = part
    data[leaf] = value


def _same_folder(path: object) -> str:
    return os.path.expanduser(str(path)).rstrip("/")
