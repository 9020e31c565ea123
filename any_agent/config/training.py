"""Settings of training: the rollouts, the data, the algorithm, and evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from any_agent.config.base import LocalPath, Section, Texts, split_texts
from any_agent.config.presets import completed, contradiction

TrackerNames = Annotated[
    tuple[Literal["trackio", "wandb", "tensorboard"], ...], BeforeValidator(split_texts)
]


class AgentConfig(Section):
    """Agents that the trainer runs on a dataset: classes with `async def run(data, ...)`."""

    mode: Literal["auto", "inline", "subproc"] = "auto"
    """The place where an agent runs: `inline`, as a coroutine beside the others; `subproc`, in a
    process of a pool, where it may block and gets the service's URL and key in its environment;
    `auto`, inline until an agent needs a main thread or is not a coroutine."""
    export_style: Literal["individual", "concat"] = "individual"
    """The rows to train on: one for each model call, or one for each conversation that is
    token-exact."""
    max_workers: int = Field(4, ge=1, le=256)
    """Processes of that pool: the agents that run at once with `rollout.agent.mode=subproc`."""
    timeout: float = Field(1800.0, gt=0)
    """Seconds after which a run of an agent fails."""

    @field_validator("mode", mode="before")
    @classmethod
    def _not_online(cls, mode: object) -> object:
        if mode == "online":
            raise ValueError(
                "agents outside the trainer need no such setting: leave out the dataset and the "
                "workflow, and let them open sessions at the service's URL"
            )
        return mode


class RolloutConfig(Section):
    batch_size: int = Field(64, ge=1)
    """Sessions in one training step."""
    max_concurrent: int = Field(64, ge=1)
    """Train sessions open at once."""
    eta: int = Field(2, ge=0)
    """Steps that a token may be older than the step that trains on it."""
    sampling: Literal["uniform", "learnable"] = "uniform"
    """The choice among a dataset's items. `uniform`: every item in each pass. `learnable`: an item
    that taught nothing, because all of its runs scored the same or none could be trained on, rests
    for the next pass, the second time in a row for three, then for seven. It needs
    `train.dynamic_sampling=refill`, and is no choice of a run with `rollout.deterministic`."""
    deterministic: bool = False
    """Derive session ids and sampling seeds from `train.seed` and each session's place in its group
    (without a group: in the order of opening; the calls of a workflow on a dataset: from the item
    and the run's number), and sort batches, so that the same agents produce the same run bit for
    bit. It needs `rollout.eta=0`, `engine.max_running_requests=1`, and agents
    that open the same groups for each step, whose members are interchangeable, as any of them may
    come first."""
    lease_ttl: float = Field(600.0, gt=0)
    """Seconds after which trajectories of a silent trainer are handed out again."""
    max_failures: int = Field(64, ge=1)
    """Consecutive failed episodes on a dataset after which training ends with the last reason. A
    failed episode is left out, and counted by its reason. One that returns None counts, too: its
    workflow rejects it, or its agent makes no model call and returns no reward. Raise it for a
    workflow that rejects nearly all."""
    max_dull_groups: int = Field(1000, ge=1)
    """Consecutive groups on a dataset with nothing to learn from after which training ends with an
    error: all runs of an item score the same, fewer than `sessions.min_group_size` are left, or
    `dynamic_filter_fn` accepts none (in `prepare_batch`: no run is kept). With agents outside,
    which may bring other tasks at any time, training goes on and reports why it
    waits."""
    dump_to_file: bool = False
    """Write every episode on a dataset, with its text, to
    `<fileroot>/<experiment>/<trial>/rollout/<version>/<task_id>.jsonl` (`eval-rollout` in an
    evaluation)."""
    fileroot: Annotated[Path | None, AfterValidator(lambda path: path and path.expanduser())] = None
    """The folder of these files; null: `<root>/<user>`, beside the run's own."""
    tokenizer_path: LocalPath = ""
    """The tokenizer that decodes the texts of these files. Empty: the model's own."""
    agent: AgentConfig = AgentConfig()  # type: ignore[call-arg]


class LoraConfig(Section):
    """LoRA: an adapter of low rank is trained on the frozen model, so that gradients and optimizer
    are as small as the adapter. Engines get the model with the adapter merged. It needs the extra
    `[lora]`. Any of these settings switches it on, such as `train.lora.rank=16`; without one, or
    with `train.lora=null`, all weights are trained."""

    rank: int = Field(16, ge=1, le=4096)
    """The rank of the adapter's matrices."""
    alpha: int = Field(32, ge=1)
    """The adapter's output is multiplied by alpha / rank."""
    dropout: float = 0.0
    """No dropout, as the trained policy must be the one that sampled; only 0 is accepted."""
    target_modules: Texts = ()
    """The layers to adapt, by name or the end of it, such as `q_proj`. Empty, or `all-linear`:
    every linear layer of the decoder."""

    @field_validator("dropout")
    @classmethod
    def _no_dropout(cls, share: float) -> float:
        if share != 0:
            raise ValueError(
                "the trained policy must be the one that sampled: leave it out, or set 0"
            )
        return share

    @field_validator("target_modules")
    @classmethod
    def _all_alone(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if "all-linear" not in names:
            return names
        if len(names) > 1:
            raise ValueError("all-linear stands for every layer: leave the others out")
        return ()


class TrainConfig(Section):
    steps: int = Field(100, ge=0)
    """Steps, one batch each; afterwards train sessions are refused and inference goes on."""
    epochs: int | None = Field(None, ge=1)
    """Passes over the dataset after which training ends, unless `train.steps` ends it earlier: its
    default does so, too. null: as many as the steps take. Refused without a dataset."""
    seed: int = 0
    """The seed of the trainer's random numbers."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device of the trainer; auto takes a GPU if there is one."""
    threads: int = Field(1, ge=1)
    """CPU threads of each of the trainer's processes."""
    processes: int = Field(1, ge=1, le=64)
    """Processes that train together on each training machine, usually one for each of its GPUs:
    weights, gradients and optimizer are divided among them. Start a script with
    `torchrun --nproc-per-node` and the same number."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The precision of forward and backward passes; weights, sums of gradients and the optimizer
    are always float32. auto: bfloat16 on GPUs, float32 on a CPU."""
    compile: bool | None = None
    """Let torch.compile fuse the kernels of the model's layers and of the log-probabilities: a step
    takes half to four fifths of the time on a GPU, and less memory, and the start up to a
    minute more. Without a C compiler a warning says so, and nothing is compiled. null: on GPUs."""
    gradient_checkpointing: bool = False
    """Keep only each layer's input for the backward pass and compute the rest again: less memory
    for longer rows, a third more work."""
    offload_optimizer: bool = False
    """Keep weights, gradients and optimizer in the machine's memory and step there; the GPU holds
    only the layers that compute. This is slower and needs far less GPU memory."""
    preset: Literal[
        "grpo",
        "dr_grpo",
        "dapo",
        "gspo",
        "gmpo",
        "dppo",
        "m2po",
        "cispo",
        "sapo",
        "vespo",
        "rloo",
        "opo",
        "maxrl",
        "reinforce_pp",
        "reinforce_pp_baseline",
    ] = "grpo"
    """The algorithm, by name: it chooses the settings from here to `train.kl_estimator` that are
    not given. docs/reference/algorithms.md has them all."""
    advantage_estimator: str = ""
    """The advantage estimator: `grpo`, `rloo`, `opo`, `maxrl`, `reinforce_pp`,
    `reinforce_pp_baseline`, or your own, by its registered name or as `package.module.function`.
    Empty: the preset's."""
    loss: str = ""
    """The loss: `grpo`, `gspo`, `gmpo`, `dppo`, `cispo`, `sapo`, `vespo`, `reinforce`, or your own,
    by its registered name or as `package.module.function`. Empty: the preset's."""
    group_by: Literal["session", "role"] = "session"
    """Whose rewards share a baseline in a group: those of its `session`s, or those of each `role`,
    the agents of a session that the header `x-any-agent-role` names."""
    dynamic_sampling: Literal["refill", "drop", "keep"] | None = None
    """The fate of a group whose sessions all score the same, so that their rewards teach nothing.
    `refill`: another one takes its place (DAPO), so that a step needs more sessions the harder or
    the easier the tasks are. `drop`: the step goes without it. `keep`: it counts as any other, with
    advantages of 0. null: `keep` with `train.teacher` or a `train.reward_coef` of 0, which leave
    something to learn from it, else `refill`."""
    discount: float = Field(1.0, ge=0, le=1)
    """The share of a turn's reward that the turn before it gets."""
    normalize_std: Literal["group", "batch", "none"] | None = None
    """Divide advantages by the standard deviation of the scores of the `group` (GRPO) or of the
    `batch`, or not at all: `none` (Dr.GRPO, RLOO). null: the estimator's own."""
    aggregation: Literal["token", "session", "turn", "constant"] | None = None
    """The mean that the loss is: over all trained `token`s (DAPO); over sessions, of each one's
    mean over its tokens; over rows, of each `turn`'s mean; or each session's sum divided by a
    `constant` length (Dr.GRPO). null: the preset's."""
    constant_length: int | None = Field(None, ge=1)
    """That length, in tokens. null: 4,096."""
    overlong_length: int | None = Field(None, ge=1)
    """DAPO's penalty of long outputs: an output of more tokens loses `train.overlong_penalty` of
    its reward, and a shorter one in the buffer below proportionally less. It counts for each model
    call by itself. null: no penalty."""
    overlong_buffer: int | None = Field(None, ge=1)
    """The width of that buffer, in tokens. null: a fifth of the length."""
    overlong_penalty: float | None = Field(None, ge=0, allow_inf_nan=False)
    """The largest penalty. null: 1."""
    mask_truncated: bool = False
    """Leave out of the loss the outputs that the limit of tokens cut off (DAPO's overlong
    filtering): their rewards count in their baseline, and they are not trained on."""
    eps_low: float | None = Field(None, ge=0, le=1)
    """The probability ratio is clipped below 1 - eps_low; its logarithm below -eps_low with `gmpo`;
    `dppo` bounds the fall of the probability itself. null: the loss's, 0.2 with `grpo`."""
    eps_high: float | None = Field(None, ge=0, allow_inf_nan=False)
    """The same above: 1 + eps_high, eps_high with `gmpo`, and the rise of the probability with
    `dppo`. null: the loss's, 0.28 with `grpo`."""
    dual_clip: float | None = Field(None, gt=1, allow_inf_nan=False)
    """The ratio above which the losses `grpo` and `gspo` clip negative advantages, too; 3 is usual.
    null: they are not clipped above."""
    tau_pos: float | None = Field(None, gt=0, allow_inf_nan=False)
    """The temperature of the gate of the loss `sapo` where the advantage is positive. null: 1."""
    tau_neg: float | None = Field(None, gt=0, allow_inf_nan=False)
    """The same where it is not. null: 1.05."""
    k_pos: float | None = Field(None, ge=0, allow_inf_nan=False)
    """The power of a row's weight in the loss `vespo` where the advantage is not negative: a larger
    one takes rows that have become unlikely out sooner. null: 2."""
    lambda_pos: float | None = Field(None, gt=0, allow_inf_nan=False)
    """The decay of this weight: a larger one takes rows that have become likely out sooner.
    null: 3."""
    k_neg: float | None = Field(None, ge=0, allow_inf_nan=False)
    """The power where the advantage is negative. null: 3."""
    lambda_neg: float | None = Field(None, gt=0, allow_inf_nan=False)
    """The decay there. null: 2."""
    is_cap: float = Field(5.0, gt=0)
    """C: the cap of the importance weight pi_prox / mu."""
    is_floor: float = Field(0.0, ge=0, allow_inf_nan=False)
    """The least importance weight."""
    is_mode: Literal["truncate", "mask"] = "truncate"
    """The fate of an importance weight beyond these bounds: it becomes the bound, or 0."""
    is_level: Literal["token", "sequence"] | None = None
    """Importance weights are those of single tokens, or the geometric mean over each row (one more
    forward pass). null: `sequence` with the losses `gspo` and `gmpo`, else `token`."""
    off_policy_threshold: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Nats: a row of negative advantage is not trained on where mu exceeds the policy by more, on
    the mean over its tokens (DeepSeek-V3.2; one more forward pass). null: all rows are."""
    rejection_k1: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Nats: a row is not trained on whose mean of log pi_prox - log mu over its tokens is further
    from 0 (one more forward pass). null: all rows are."""
    rejection_k2: float | None = Field(None, gt=0, allow_inf_nan=False)
    """The same, for the mean of half its square: of rows of which engine and trainer disagree in
    either direction, though not on the mean."""
    rejection_k3: float | None = Field(None, gt=0, allow_inf_nan=False)
    """The same, for the mean of r - 1 - log r with r = pi_prox / mu, an estimate of the divergence
    that is never negative."""
    second_moment: float | None = Field(None, gt=0, allow_inf_nan=False)
    """The bound of the mean of (log pi_theta - log mu) squared over a minibatch's tokens: those
    with the largest squares are not trained on until the others keep it (M2PO; one more forward
    pass for each update). null: the preset's, 0.04 with `m2po`, else no bound."""
    entropy_coef: float = Field(0.0, ge=0, allow_inf_nan=False)
    """The factor of the entropy in the loss, from which it is subtracted."""
    top_entropy: float = Field(1.0, gt=0, le=1)
    """The share of a minibatch's tokens that are trained on, those where the policy's entropy is
    highest: 0.2 in the paper (arXiv 2506.01939). Terms of the loss other than the policy's keep all
    tokens. Below 1 it costs one more forward pass."""
    kl_coef: float = Field(0.0, ge=0, allow_inf_nan=False)
    """The factor of the divergence from the reference model, a term of the loss. 0: no reference
    model is loaded."""
    kl_estimator: Literal["k1", "k2", "k3", "k3_unbiased"] | None = None
    """The estimate of this divergence. On policy k2 and k3_unbiased (k3 times pi_theta / pi_prox)
    have its gradient, k3 that of the reverse divergence, and k1 none. null: the preset's, k3 with
    `grpo`."""
    kl_reward_coef: float = Field(0.0, ge=0, allow_inf_nan=False)
    """The factor of the divergence from the reference model in the reward, from which it is
    subtracted: an output loses this times the sum of log mu - log pi_ref over its tokens, as with
    RLOO and REINFORCE++. 0: rewards are trained on as they are."""
    reference_model: LocalPath = ""
    """The reference model of either, a folder or a hub name; it needs the policy's tokenizer and an
    equal `vocab_size`. Empty: `model.path`, the model that training begins with, also after a
    restart. Its weights stay in memory beside the policy's, unless it is the model that
    `train.lora` adapts."""
    teacher: LocalPath = ""
    """A model to distil from, a folder or a hub name; it needs the policy's tokenizer and an equal
    `vocab_size`, padding included, which some families pad further in their larger models. It may
    be wider or deeper, or a checkpoint of another trial. Its weights stay in memory beside the
    policy's, the output head whole in each process. Empty: none."""
    teacher_coef: float = Field(0.0, ge=0, allow_inf_nan=False)
    """The factor of the divergence from the teacher, a term of the loss: over the whole vocabulary,
    at each token that the policy sampled and is trained on (on-policy distillation). It needs
    `train.teacher`; 1 is usual."""
    teacher_kind: Literal["reverse", "forward"] | None = None
    """This divergence: `reverse`, KL(policy, teacher), which takes from the policy what the teacher
    would not say; `forward`, KL(teacher, policy), which gives it all that the teacher might say.
    null: `reverse`."""
    reward_coef: float = Field(1.0, ge=0, allow_inf_nan=False)
    """The factor of the advantages beside `train.teacher` or `train.kl_coef`. 0: rewards are
    reported, and only the other model teaches."""
    minibatches: int = Field(1, ge=1)
    """Parts of a batch with an optimizer update each, about equal in trained tokens. Groups stay
    whole, or sessions where there are fewer groups than parts. A batch and its updates are one
    step: `train.steps`, `rollout.eta` and the learning rate count steps."""
    epochs_per_batch: int = Field(1, ge=1)
    """Passes over each batch, with an optimizer update for each minibatch in each of them. With
    more than one update in a step, a copy of weights and optimizer is kept until the last one
    has succeeded."""
    lr: float = Field(1e-6, gt=0)
    """The learning rate of AdamW; a schedule's highest one."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The course of the learning rate after the warm-up: it stays, or falls evenly or by half a
    cosine until the last of `train.steps`, or of the most steps that `train.epochs` can make."""
    warmup_steps: int = Field(0, ge=0)
    """The first steps, in which the learning rate rises evenly to `train.lr`."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """The share of `train.lr` that `linear` and `cosine` fall towards."""
    betas: tuple[float, float] = (0.9, 0.999)
    """The betas of AdamW."""
    weight_decay: float = Field(0.0, ge=0)
    """The weight decay of AdamW."""
    grad_clip: float = Field(1.0, gt=0)
    """The norm to which a larger gradient is scaled down."""
    lora: LoraConfig | None = None
    """An adapter of low rank to train. null: all weights are trained."""
    packing: Literal["tree", "rows"] = "tree"
    """`tree` computes a prefix that several calls share once, with the same loss and gradient;
    `rows` computes every call by itself, in batches, as does `tree`, with a warning, for models
    whose attention is not plainly causal. A model that looks at other rows of a batch gets each
    call alone in either case, with a warning."""
    micro_batch_tokens: int | None = Field(None, ge=16)
    """The most tokens in one forward pass of one process, which bounds its memory; a longer row is
    not cut. null: chosen by the model's shape and the device. On a CPU as
    many as have 1 GB of activations, 256 to 768; on a GPU as many as its free memory holds beside
    the optimizer's state, 1,024 to 16,384. A restart keeps the choice."""
    max_row_tokens: int | None = Field(None, ge=16)
    """The longest row, in tokens: a session with a longer one is rejected as `too_long`, and the
    log names it, as one with a row beyond the model's context. null: no other limit, and a row that
    does not fit into memory ends the trainer."""
    checkpoint_every: int = Field(20, ge=1)
    """Steps between checkpoints; the last step always has one. A restarted trainer repeats the
    steps since the last checkpoint; until then the ranks keep the sessions of these steps in
    memory."""
    keep_checkpoints: int = Field(3, ge=1)
    """Checkpoints kept on disk."""
    keep_weights: int = Field(2, ge=1)
    """Published weight versions kept on disk."""

    @model_validator(mode="after")
    def _has_an_effect(self) -> Self:
        if self.reference_model and not self.compares:
            raise ValueError(
                "train.reference_model is for the KL term: set train.kl_coef or "
                "train.kl_reward_coef above 0, or leave it out"
            )
        if bool(self.teacher) is not bool(self.teacher_coef):
            raise ValueError(
                f"train.teacher_coef is 0, and train.teacher={self.teacher} has no effect: set the "
                "factor (1 is usual), or leave the teacher out"
                if self.teacher
                else f"train.teacher_coef={self.teacher_coef:g} has no effect without a model to "
                "distil from: set train.teacher, or leave it out"
            )
        if self.min_lr_ratio and self.lr_schedule == "constant":
            raise ValueError(
                "train.min_lr_ratio is for a falling rate: set train.lr_schedule to linear or "
                "cosine, or leave it out"
            )
        return self

    @property
    def compares(self) -> bool:
        """True if steps compare the policy with a reference model."""
        return self.kl_coef > 0 or self.kl_reward_coef > 0

    @property
    def frozen_models(self) -> dict[str, str]:
        """The models that steps need beside the policy, `reference` and `teacher`; an empty name
        is that of `model.path`."""
        found = {"reference": self.reference_model} if self.compares else {}
        return found | ({"teacher": self.teacher} if self.teacher_coef else {})

    @property
    def compares_in_groups(self) -> bool:
        """True if a group whose sessions score alike teaches nothing."""
        return self.advantage_estimator != "reinforce_pp"

    _chosen: frozenset[str] = frozenset()
    """The settings that were not given, and have the preset's values."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        settings = self.__dict__
        chosen = completed(settings)
        # Validated once more as a part of the whole, there is nothing left to choose.
        self._chosen |= frozenset(chosen)
        settings.update(chosen)
        if (problem := contradiction(settings)) is not None:
            raise ValueError(problem)
        return self

    @property
    def chosen(self) -> dict[str, Any]:
        """The settings that are not given, with the values that the preset chose."""
        return {name: getattr(self, name) for name in sorted(self._chosen)}

    @model_serializer(mode="wrap")
    def _as_given(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what the preset chose: another one may be set on top of saved settings."""
        data: dict[str, Any] = plain(self)
        defaults = {name: type(self).model_fields[name].default for name in self._chosen}
        return data | {name: value for name, value in defaults.items() if name in data}


class DatasetConfig(Section):
    """Tasks, for training on a dataset; agents outside bring their own."""

    path: LocalPath = ""
    """A JSONL or Parquet file, a folder of such files, a folder that `datasets` has saved, or a
    data set's name on the Hugging Face hub. Empty: no dataset."""
    name: str = ""
    """The configuration of a data set on the hub, such as `main`."""
    split: str | None = None
    """The part of a folder or of a data set on the hub, such as `train`; a file has no parts.
    null: the only part."""
    shuffle: bool = True
    """Draw another order of the items for each pass from `train.seed`. An evaluation takes all
    items in their own order."""
    max_length: int | None = Field(None, ge=1)
    """The longest prompt, in tokens; items with longer ones are left out. null: no limit."""
    limit: int | None = Field(None, ge=1)
    """Number of items to take from the beginning. null: all."""


class EvalConfig(Section):
    """Runs of a workflow on the validation dataset, which nothing is trained on."""

    every: int = Field(0, ge=0)
    """Steps between two evaluations; the last step is always evaluated. 0: no evaluations."""
    at_start: bool = False
    """Also evaluate the model before the first step."""
    group_size: int = Field(1, ge=1, le=1024)
    """Runs of each item."""
    temperature: float | None = Field(None, ge=0, le=10)
    """The sampling temperature in an evaluation, unless an agent sets another one; 0 always takes
    the likeliest token. null: that of training."""
    timeout: float = Field(3600.0, gt=0)
    """Seconds that one evaluation may take; runs that have not ended by then fail."""


class TrackingConfig(Section):
    """Trackers, which show the lines of `metrics.jsonl` as curves. Each is an extra of this package
    (`pip install "any-agent-rl[wandb]"`), and is set up by its own environment variables."""

    to: TrackerNames = ()
    """The trackers: `trackio`, `wandb`, `tensorboard`. One that is added later gets all steps."""
    project: str = Field("", max_length=128)
    """The project at trackio and Weights & Biases. Empty: the experiment's name."""
