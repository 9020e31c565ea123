"""Settings of training: how trajectories are gathered, from which data, and the algorithm."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from any_agent.config.base import Section


class AgentConfig(Section):
    """Agents that the trainer runs on a dataset: classes with `async def run(data, ...)`."""

    mode: Literal["auto", "inline", "subproc"] = "auto"
    """Where an agent runs: `inline`, as a coroutine beside the others; `subproc`, in a process of a
    pool, where it may block and is told the service's URL and its key by the environment; `auto`,
    inline until an agent turns out to need a main thread or to be no coroutine."""
    export_style: Literal["individual", "concat"] = "individual"
    """What is trained on: every model call as a row of its own, or each conversation as one row
    where it is token-exact."""
    max_workers: int = Field(4, ge=1, le=256)
    """Processes of that pool: how many agents run at once with `rollout.agent.mode=subproc`."""
    timeout: float = Field(1800.0, gt=0)
    """Seconds that one run of an agent may take; then it has failed."""

    @field_validator("mode", mode="before")
    @classmethod
    def _not_online(cls, mode: object) -> object:
        if mode == "online":
            raise ValueError(
                "agents outside are served without this setting: leave out the dataset and the "
                "workflow, and let them open sessions at the service's URL"
            )
        return mode


class RolloutConfig(Section):
    batch_size: int = Field(64, ge=1)
    """Sessions in one training step."""
    max_concurrent: int = Field(64, ge=1)
    """Train sessions open at once."""
    eta: int = Field(2, ge=0)
    """Optimizer steps that a token may be older than the step that trains on it."""
    deterministic: bool = False
    """Derive session ids and sampling seeds from `train.seed` and each session's place in its group
    (without a group: in the order of opening), and sort batches, so that the same agents give the
    same run bit for bit: with `rollout.eta=0`, `engine.max_running_requests=1`, and agents that
    open the same groups for each step, of interchangeable members, as any of them may come first.
    """
    lease_ttl: float = Field(600.0, gt=0)
    """Seconds after which trajectories of a silent trainer are handed out again."""
    max_failures: int = Field(64, ge=1)
    """Episodes on a dataset that may fail in a row before training ends with the last one's reason.
    One that fails is left out, and counted by its reason."""
    max_dull_groups: int = Field(1000, ge=1)
    """Groups on a dataset that may come in a row with nothing to learn from, as all runs of an item
    score the same or `dynamic_filter_fn` takes none (in `prepare_batch`: as no run is kept), before
    training ends and says so. Agents outside may bring other tasks at any time: for them training
    goes on, and says why it waits."""
    dump_to_file: bool = False
    """Write every episode on a dataset, with its text, to
    `<fileroot>/<experiment>/<trial>/rollout/<version>/<task_id>.jsonl` (`eval-rollout` in an
    evaluation)."""
    fileroot: Path | None = None
    """Where these files lie; null: `<root>/<user>`, beside the run's own."""
    tokenizer_path: str = ""
    """The tokenizer that these files' texts are decoded with. Empty: the model's own."""
    agent: AgentConfig = AgentConfig()  # type: ignore[call-arg]

    @field_validator("fileroot")
    @classmethod
    def _without_tilde(cls, path: Path | None) -> Path | None:
        return path.expanduser() if path is not None else None

    @field_validator("tokenizer_path")
    @classmethod
    def _tokenizer_without_tilde(cls, path: str) -> str:
        return os.path.expanduser(path)


class TrainConfig(Section):
    steps: int = Field(100, ge=0)
    """Optimizer steps; then train sessions are refused and inference goes on."""
    epochs: int | None = Field(None, ge=1)
    """Passes over the dataset after which training ends, if `train.steps` has not ended it before.
    null: as many as the steps take."""
    seed: int = 0
    """Of the trainer's random numbers."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the trainer runs; auto takes a GPU if there is one."""
    threads: int = Field(1, ge=1)
    """CPU threads of each of the trainer's processes."""
    processes: int = Field(1, ge=1, le=64)
    """Processes that train together on each training machine, usually one for each of its GPUs:
    weights, gradients and optimizer are divided among them. A script is started by
    `torchrun --nproc-per-node` with as many."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What forward and backward passes compute in; weights, gradients' sums and the optimizer are
    float32 always. auto: bfloat16 on GPUs, float32 on a CPU."""
    gradient_checkpointing: bool = False
    """Keep only each layer's input for the backward pass and compute the rest again: less memory
    for longer rows, a third more work."""
    offload_optimizer: bool = False
    """Keep weights, gradients and optimizer in the machine's memory and step there; the GPU holds
    the layers at work only. Slower, and far less GPU memory."""
    preset: str = "grpo"
    """The algorithm, by name: its advantage estimator and its loss."""
    advantage_estimator: str = ""
    """An advantage estimator of your own, by its registered name or as `package.module.function`.
    Empty: the preset's."""
    loss: str = ""
    """A loss of your own, by its registered name or as `package.module.function`. Empty: the
    preset's."""
    discount: float = Field(1.0, ge=0, le=1)
    """How much of a later turn's reward an earlier turn gets, per turn."""
    normalize_std: bool = True
    """Divide advantages by the group's standard deviation; false is Dr.GRPO."""
    eps_low: float = Field(0.2, ge=0)
    """The probability ratio is clipped below 1 - eps_low."""
    eps_high: float = Field(0.28, ge=0)
    """The probability ratio is clipped above 1 + eps_high."""
    is_cap: float = Field(5.0, gt=0)
    """C: the cap of the weight pi_prox / mu."""
    kl_coef: float = 0.0
    """No KL term to a reference model; only 0 is accepted."""
    lr: float = Field(1e-6, gt=0)
    """AdamW's learning rate, constant."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's."""
    grad_clip: float = Field(1.0, gt=0)
    """The norm that a larger gradient is scaled down to."""
    micro_batch_tokens: int = Field(16_384, ge=16)
    """Padded tokens in one forward pass of one process."""
    max_row_tokens: int | None = Field(None, ge=16)
    """Sessions with a longer row, in tokens, are not trained on: they are rejected as `too_long`,
    and the log names them. null: no limit, and a row that no memory holds ends the trainer."""
    checkpoint_every: int = Field(20, ge=1)
    """Steps between checkpoints; the last step is always kept. A restarted trainer makes the steps
    since the last one again, and the ranks keep the sessions of all of them in memory until it
    has."""
    keep_checkpoints: int = Field(3, ge=1)
    """Checkpoints kept on disk."""
    keep_weights: int = Field(2, ge=1)
    """Published weight versions kept on disk."""

    @field_validator("kl_coef")
    @classmethod
    def _no_kl(cls, coefficient: float) -> float:
        if coefficient != 0:
            raise ValueError("there is no KL term to a reference model: leave it out, or set 0")
        return coefficient


class DatasetConfig(Section):
    """Tasks, for training on a dataset; agents outside bring their own."""

    path: str = ""
    """A JSONL or Parquet file, a folder of such files, a folder that `datasets` has saved, or a
    data set's name on the Hugging Face hub. Empty: none."""
    name: str = ""
    """Which configuration of a data set on the hub, such as `main`."""
    split: str | None = None
    """Which part of a folder or of a data set on the hub, such as `train`; a file has no parts.
    null: the only one there is."""
    shuffle: bool = True
    """Take the items in another order in each pass, drawn from `train.seed`. An evaluation takes
    all of them, in their own order."""
    max_length: int | None = Field(None, ge=1)
    """Leave out items with longer prompts, in tokens. null: none."""
    limit: int | None = Field(None, ge=1)
    """Take the first so many items only. null: all."""

    @field_validator("path")
    @classmethod
    def _without_tilde(cls, path: str) -> str:
        return os.path.expanduser(path)


class EvalConfig(Section):
    """Runs of a workflow on the validation dataset, which nothing is trained on."""

    every: int = Field(0, ge=0)
    """Steps between two evaluations; the last step is always evaluated. 0: never."""
    at_start: bool = False
    """Evaluate before the first step, too: what the model could do before."""
    group_size: int = Field(1, ge=1, le=1024)
    """Runs of each item."""
    temperature: float | None = Field(None, ge=0, le=10)
    """Of tokens sampled in an evaluation, unless an agent asks for another one; 0: the likeliest
    token always. null: as in training."""
    timeout: float = Field(3600.0, gt=0)
    """Seconds that one evaluation may take; what is not there by then has failed."""
