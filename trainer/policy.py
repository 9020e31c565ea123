"""The model being trained: log-probabilities of trained tokens, and optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from any_agent.engine.weight_serialization import align
from any_agent.errors import ConfigError, StartupError
from trainer.command_channel import Leader
from trainer.loss import LOSSES, LossConfig, LossStats, logprobs_of
from trainer.packing import (
    Batch,
    Row,
    TrainedTokens,
    balanced,
    batches_of,
    count_trained,
    micro_batches,
    trained_tokens,
)
from trainer.step_clock import StepClock
from trainer.weight_buckets import Bucket, in_buckets, stored_tensors
from trainer.world import UnshardedModel, World, alone, in_turn, shard, summed, whole_tensor


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """The settings of a policy's memory, computation and optimizer.

    ``head_chunk`` is the number of trained tokens whose logits [head_chunk, vocab] exist at a
    time, forward and backward. ``threads`` None leaves torch's choice; one is best for tiny
    models. ``attention`` is transformers' ``attn_implementation``.
    """

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    head_chunk: int = 1024
    attention: str = "sdpa"
    gradient_checkpointing: bool = False
    dtype: torch.dtype | None = None
    """The type that passes compute in; None: the weights' own type."""
    offload: bool = False
    """Keep weights, gradients and optimizer in the machine's memory between their uses."""
    device: str = "cpu"
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.head_chunk < 1 or self.grad_clip <= 0:
            raise ConfigError("head_chunk and grad_clip must be positive")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The policy's log-probabilities of a batch's n trained tokens: float, shape [n], nats."""

    tokens: TrainedTokens
    logprobs: Tensor
    entropies: Tensor
    """The entropies, without gradient."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimizer step. ``grad_norm`` is the global L2 norm before clipping."""

    stats: LossStats
    grad_norm: float
    learning_rate: float


class GradientNotFinite(FloatingPointError):
    """A gradient that is not finite, although this process's log-probabilities are."""


class Policy:
    """A causal language model, its AdamW, and the number of optimizer steps made.

    ``model`` is a transformers causal LM, its parameters the float32 master copy. Dropout is off:
    the trained policy must be the one that sampled. No method draws random numbers: the same
    weights, optimizer state and batches give the same step, bit for bit (on one kind of machine,
    with one number of processes).

    In a ``world`` of several processes each has a share of the weights, the gradients and the
    optimizer, and all must call :meth:`step` together, each with its own batches; the leading
    one starts that through its ``leader``. A single process divides nothing unless ``config`` needs
    it. ``model`` may be a result of :func:`prepared`.
    """

    def __init__(
        self, model: Any, config: PolicyConfig | None = None, world: World | None = None
    ) -> None:
        self.config = config or PolicyConfig()
        if self.config.threads is not None:
            torch.set_num_threads(self.config.threads)
        self.world = world = world_for(self.config, world)
        self.leader: Leader | None = None
        """The commands to the other processes of the world, if this one leads them."""
        self.whole: Any = (
            model if isinstance(model, UnshardedModel) else prepared(model, self.config, world)
        )
        self.model: Any = self.whole.model
        self.optimizer = torch.optim.AdamW(
            [p for p in self.model.parameters() if p.requires_grad],
            lr=self.config.lr,
            betas=self.config.betas,
            eps=self.config.eps,
            weight_decay=self.config.weight_decay,
        )
        self.steps = 0
        self.clock = StepClock(self.device)
        """The seconds of packing, forward and backward passes, and optimizer."""
        self._cause: FloatingPointError | None = None
        """The first value of the current step on this process that is not finite."""
        self._require_plain_head()

    @classmethod
    def load(
        cls, source: str | Path, config: PolicyConfig | None = None, world: World | None = None
    ) -> Policy:
        """Load from a local folder or a hub name, safetensors only, in float32.

        Raises StartupError for missing weights, which transformers would draw at random.
        """
        from transformers import AutoModelForCausalLM

        config = config or PolicyConfig()
        world = world_for(config, world)
        with in_turn(world):
            model, report = AutoModelForCausalLM.from_pretrained(
                str(source),
                dtype=torch.float32,
                use_safetensors=True,
                attn_implementation=config.attention,
                output_loading_info=True,
            )
            wrong = sorted(report["missing_keys"]) + sorted(map(str, report["mismatched_keys"]))
            if wrong:
                listed = ", ".join(wrong)
                raise StartupError(f"{source}: weights are missing or misshapen: {listed}")
            whole = prepared(model, config, world)
            del model
        return cls(whole, config, world)

    @property
    def device(self) -> torch.device:
        return self.world.device if self.world is not None else torch.device(self.config.device)

    def buckets(self, nbytes: int, dtype: torch.dtype | None = None) -> Iterator[Bucket]:
        """Yield the weights as whole ``(name, tensor)`` by a checkpoint's names, tied ones once.

        A bucket has at most ``nbytes``, and one tensor at least. Floating-point tensors come in
        ``dtype``, default as trained (float32), on this policy's device, without gradient. They
        may be the policy's own: neither change them nor keep them over a step. The iterator may be
        closed early.
        """

        def gather(names: list[str]) -> list[Tensor]:
            with self.commanded({"do": "gather", "names": names}):
                return self.gathered(names)

        return in_buckets(self.model, nbytes, dtype, gather)

    def commanded(self, command: Mapping[str, Any]) -> AbstractContextManager[object]:
        """Let the other processes, if this one leads any, execute a command with the body."""
        return self.leader.run(command) if self.leader is not None else nullcontext()

    def gathered(self, names: Sequence[str]) -> list[Tensor]:
        """Return these stored tensors, whole. All processes must call it together."""
        stored = stored_tensors(self.model)
        return [whole_tensor(stored[name].detach(), self.device) for name in names]

    def token_logprobs(self, batch: Batch, temperature: float | Tensor = 1.0) -> TokenLogprobs:
        """Return ``log_softmax(logits / T)`` of every trained token, and the entropies.

        ``temperature`` is one for all or [batch]. The head runs only where the next token is
        trained, chunk by chunk, and again in the backward pass, so that [tokens, vocab] logits
        never exist at once. The results are at least float32, whatever the model computes in.
        """
        tokens = trained_tokens(batch)
        if not isinstance(temperature, Tensor):
            temperature = torch.tensor(temperature, dtype=torch.float64)
        ids = batch["input_ids"].long()
        per_row = temperature.to(ids.device).expand(ids.shape[0])
        if not bool((per_row > 0).all()):
            raise ValueError("temperatures must be positive: greedy tokens cannot be trained on")
        temperatures = tokens.spread(per_row)
        logprobs, entropies = self._within(
            logprobs_of, ids, tokens, temperatures, self.config.head_chunk
        )
        return TokenLogprobs(tokens, logprobs, entropies)

    def _within(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Return ``work(model, *arguments)``, run while the weights that it uses are whole."""
        out = self.whole(work, *arguments)
        if self.world is not None and not torch.is_grad_enabled():
            # No backward pass follows that would divide the last of them again.
            self.whole.reshard()
        return out

    def train(
        self, rows: Sequence[Row], token_budget: int, config: LossConfig | None = None
    ) -> StepResult:
        """Make one optimizer step on these rows, on all processes: see :meth:`step`.

        ``token_budget`` bounds one process's forward pass.
        """
        total = count_trained(rows)
        if self.leader is None or not total:
            # Without trained tokens it fails before the other processes get the command, which
            # would end them.
            return self.step(micro_batches(rows, token_budget), total, config)
        parts = balanced(rows, self.leader.world.size)
        count = max(len(micro_batches(part, token_budget)) for part in parts)
        command = {
            "do": "step",
            "batches": count,
            "budget": token_budget,
            "tokens": total,
            "loss": asdict(config or LossConfig()),
        }
        found: list[str] = []
        try:
            with self.leader.run(command, parts) as found:
                batches = batches_of(parts[0], token_budget, count)
                return self.step(batches, total, config)
        except GradientNotFinite:
            if found:
                raise FloatingPointError(found[0]) from None
            raise

    def step(
        self, batches: Sequence[Batch], total_tokens: int, config: LossConfig | None = None
    ) -> StepResult:
        """Make one optimizer step over all micro-batches: accumulate, clip, update.

        ``batches`` carry ``advantages`` and ``temperatures``; ``total_tokens`` is N over all
        micro-batches and ranks. pi_prox is the policy before the step. But for rounding the result
        does not depend on how rows are split into batches.

        All processes of a world must bring equally many batches, idle ones if need be
        (:func:`trainer.packing.idle_batch`). The statistics are those of all processes.

        Raises ValueError without batches; FloatingPointError, the weights untouched, where a
        log-probability, the loss or the gradient is not finite, on every process of a world.
        """
        if not batches:
            raise ValueError("there is nothing to train on")
        self.optimizer.zero_grad(set_to_none=True)
        self.clock.lap("pack")
        try:
            stats = self.accumulate(batches, total_tokens, config or LossConfig())
            norm = float(
                whole_tensor(
                    nn.utils.clip_grad_norm_(
                        [p for p in self.model.parameters() if p.requires_grad],
                        self.config.grad_clip,
                    ),
                    self.device,
                )
            )
            if not math.isfinite(norm):
                raise self._cause or GradientNotFinite(
                    f"the gradient's norm is {norm} at step {self.steps}"
                )
            rate = float(self.optimizer.param_groups[0]["lr"])
            self.optimizer.step()
        finally:
            self.optimizer.zero_grad(set_to_none=True)
            self.clock.lap("optimizer")
        self.steps += 1
        return StepResult(stats, norm, rate)

    def accumulate(
        self, batches: Sequence[Batch], total_tokens: int, config: LossConfig
    ) -> LossStats:
        """Add the gradient of every micro-batch's share of the loss to the parameters' ``grad``."""
        stats = LossStats()
        self._cause = None
        for k, batch in enumerate(batches):
            loss, part = self._loss(k, batch, total_tokens, config)
            part.tokens_computed = batch["input_ids"].numel()
            if "logprobs" in batch:  # else it is idle
                part.tokens_in_rows = int(batch["attention_mask"].sum())
            self.clock.lap("forward")
            loss.backward()  # type: ignore[no-untyped-call]
            self.clock.lap("backward")
            stats = stats + part
        return stats if self.world is None else summed(stats, self.world)

    def _loss(
        self, k: int, batch: Batch, total_tokens: int, config: LossConfig
    ) -> tuple[Tensor, LossStats]:
        batch = {key: tensor.to(self.device) for key, tensor in batch.items()}
        now = self.token_logprobs(batch, batch["temperatures"])
        if "logprobs" not in batch:
            # An idle batch takes part in the collective operations, and adds nothing.
            return 0.0 * now.logprobs.sum(), LossStats()
        try:
            return LOSSES.find(config.name)(
                now.logprobs,
                now.tokens.gather(batch["logprobs"]),
                now.tokens.spread(batch["advantages"]),
                total_tokens=total_tokens,
                config=config,
                entropies=now.entropies,
                place=lambda i: f"micro-batch {k}, {now.tokens.place(i)}",
            )
        except FloatingPointError as error:
            if self.world is None:
                raise
            # The others wait for this process's gradient: NaN tells them all.
            self._cause = self._cause or error
            return math.nan * now.logprobs.sum(), LossStats()

    def _require_plain_head(self) -> None:
        """Raise StartupError for a model that changes its logits after the head, as by a cap."""
        vocabulary = self.model.get_output_embeddings().weight.shape[0]
        ids = torch.arange(1, 5, device=self.device)[None] % vocabulary
        with torch.no_grad():
            whole, parts = self._within(_logits_in_two_ways, ids)
        bent = getattr(self.model.config.get_text_config(), "final_logit_softcapping", None)
        if bent or not torch.allclose(whole, parts, rtol=1e-6, atol=1e-6):
            raise StartupError(
                f"{type(self.model).__name__} changes its logits after the output head; "
                "such models cannot be trained yet"
            )


def world_for(config: PolicyConfig, world: World | None) -> World | None:
    """Return the world to divide weights in: this process alone if the configuration needs one."""
    if world is None and (config.dtype is not None or config.offload):
        return alone(config.device)
    return world


def prepared(model: Any, config: PolicyConfig, world: World | None) -> UnshardedModel:
    """Prepare a model for training: no dropout, on its device, divided among the processes."""
    whole = UnshardedModel(model)
    model.eval()
    if world is None:
        model.to(config.device)
        align(model)
    _switch_dropout_off(model)
    if config.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
        # transformers checkpoints in training mode only; dropout is already off.
        model.train()
    if world is not None:
        shard(whole, world, dtype=config.dtype, offload=config.offload)
    return whole


def _logits_in_two_ways(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    body = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return model(input_ids=ids, use_cache=False).logits, model.get_output_embeddings()(body)


def _switch_dropout_off(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            setattr(module, "attention_dropout", 0.0)  # noqa: B010 - mypy takes it for a tensor
