"""The model being trained: log-probabilities of trained tokens, and optimizer steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from any_agent.engine.weight_serialization import align
from any_agent.errors import ConfigError, StartupError
from trainer.command_channel import Leader
from trainer.lora import BaseWeights, Lora, add_adapter, merged, switched_off
from trainer.loss import (
    LOSSES,
    LossConfig,
    LossStats,
    hidden_of,
    logprobs_of,
    pass_logprobs,
)
from trainer.packing import (
    Batch,
    Items,
    Pass,
    Row,
    TrainedTokens,
    balanced,
    balanced_tries,
    count_trained,
    idle_batch,
    padded_pass,
    padded_passes,
    shared_parts,
    trained_tokens,
    tree_passes,
)
from trainer.step_clock import StepClock
from trainer.tree_attention import TreePass
from trainer.tree_probe import use_tree_attention
from trainer.weight_buckets import Bucket, in_buckets, stored_tensors
from trainer.world import UnshardedModel, World, alone, in_turn, shard, summed, whole_tensor

log = logging.getLogger(__name__)

PASS_TOKENS = {"cpu": 1536, "cuda": 16_384}
"""Tokens of a pass where none are set. On a CPU activations that outgrow the cache are paid for
page by page; a GPU needs large matrices."""

MAX_HEAD_CHUNK = 1024
_CPU_LOGITS = 1 << 25
"""The most logits at a time on a CPU: 128 MiB in float32."""


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """The settings of a policy's memory, computation and optimizer.

    ``head_chunk`` is the number of trained tokens whose logits [head_chunk, vocab] exist at a
    time, forward and backward; None: what suits the device and the vocabulary. ``threads`` None
    leaves torch's choice; one is best for tiny models. ``attention`` is transformers'
    ``attn_implementation``.
    """

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    head_chunk: int | None = None
    attention: str = "sdpa"
    packing: Literal["tree", "rows"] = "tree"
    """Compute a prefix that rows share once, or each row by itself."""
    gradient_checkpointing: bool = False
    dtype: torch.dtype | None = None
    """The type that passes compute in; None: the weights' own type."""
    offload: bool = False
    """Keep weights, gradients and optimizer in the machine's memory between their uses."""
    device: str = "cpu"
    threads: int | None = None
    lora: Lora | None = None
    """Train an adapter of this kind, and leave the model's own weights as they are."""

    def __post_init__(self) -> None:
        if (self.head_chunk or 1) < 1 or self.grad_clip <= 0:
            raise ConfigError("head_chunk and grad_clip must be positive")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The policy's log-probabilities of a batch's n trained tokens: float, shape [n], nats."""

    tokens: TrainedTokens
    logprobs: Tensor
    entropies: Tensor
    """The entropies, without gradient."""


@dataclass(frozen=True, slots=True)
class Computed:
    """One pass, computed forward: its items' log-probabilities and entropies, [n]."""

    number: int
    items: Items
    tree: TreePass | None
    logprobs: Tensor
    entropies: Tensor


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
        self.base: BaseWeights | None = None
        """The weights that an adapter is trained on, where this process leads."""
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
        self.head_chunk = self.config.head_chunk or self._suitable_chunk()
        self._require_plain_head()
        self.packing = self.config.packing
        """How rows are computed, here: `rows` also for a model that cannot share prefixes."""
        if self.packing == "tree":
            dtype = self.config.dtype or next(self.model.parameters()).dtype
            if reason := use_tree_attention(self.model, self._within, dtype, self.device):
                log.warning("%s: every row is computed by itself, which costs more", reason)
                self.packing = "rows"

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
        policy = cls(whole, config, world)
        if config.lora is not None and (world is None or world.leads):
            policy.base = BaseWeights.of(source)
        return policy

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
        """Return these stored tensors, whole, or tensors of the adapter, which is in the others.

        All processes must call it together.
        """
        stored = stored_tensors(self.model)
        return merged(self.model, stored, names, lambda t: whole_tensor(t.detach(), self.device))

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Let this process compute the log-probabilities of the base model, bit for bit.

        Raises ValueError for a policy without an adapter.
        """
        if self.config.lora is None:
            raise ValueError("this policy has no adapter: train.lora is not set")
        with switched_off(self.model):
            yield

    def token_logprobs(self, batch: Batch, temperature: float | Tensor = 1.0) -> TokenLogprobs:
        """Return ``log_softmax(logits / T)`` of every trained token of padded rows, and the
        entropies.

        ``temperature`` is one for all or [batch]. The head runs only where the next token is
        trained, chunk by chunk, and again in the backward pass, so that [tokens, vocab] logits
        never exist at once. The results are at least float32, whatever the model computes in.
        """
        if not isinstance(temperature, Tensor):
            temperature = torch.tensor(temperature, dtype=torch.float64)
        per_row = temperature.expand(batch["input_ids"].shape[0])
        work = padded_pass(batch | {"temperatures": per_row}).to(self.device)
        logprobs, entropies = self._within(pass_logprobs, work, None, self.head_chunk)
        return TokenLogprobs(trained_tokens(batch), logprobs, entropies)

    def row_logprobs(
        self, rows: Sequence[Row], token_budget: int | None = None, count: int = 0
    ) -> list[Tensor]:
        """Return the log-probabilities of each row's trained tokens, [their number], float.

        Each row states its temperature. No gradient is kept. In a world all processes must call it
        together, each with its own rows and the ``count`` of passes of the longest plan.
        """
        with torch.no_grad():
            found = [
                (done.items.sequences, done.items.positions, done.logprobs)
                for done in self._run(self.plan(rows, token_budget, count))
                if done.items.inputs
            ]
        counts = [int(row["loss_mask"].sum()) for row in rows]
        if not found:
            return [torch.zeros(0) for _ in rows]
        parts = zip(*found, strict=True)
        sequences, positions, logprobs = (torch.cat(part).cpu() for part in parts)
        order = np.lexsort((positions.numpy(), sequences.numpy()))
        return list(torch.split(logprobs[torch.from_numpy(order)], counts))

    def plan(
        self, rows: Sequence[Row], token_budget: int | None = None, count: int = 0
    ) -> list[Pass]:
        """Return the passes over these rows, and idle ones up to ``count``.

        ``token_budget`` bounds the tokens of a pass; None: what suits the device. The same rows,
        in any order, and the same settings make the same plan.
        """
        budget = self._budget(token_budget)
        if self.packing == "rows":
            passes = padded_passes(rows, budget)
        elif self.world is None:
            passes = tree_passes(rows, budget)
        else:
            # Weights are gathered and divided in each pass: one must end before the next begins.
            parts = shared_parts(rows, budget)
            passes = [one for part in parts for one in tree_passes(part, budget, divided=False)]
        return passes + [padded_pass(idle_batch()) for _ in range(count - len(passes))]

    def shares(
        self, rows: Sequence[Row], processes: int, token_budget: int | None = None
    ) -> tuple[list[list[Row]], int]:
        """Return the rows of each process, and the number of passes that each must run."""
        budget = self._budget(token_budget)
        if self.packing == "rows":
            parts = balanced(rows, processes)
            return parts, max(len(padded_passes(part, budget)) for part in parts)
        parts = balanced_tries(rows, processes, budget)
        return parts, max(len(shared_parts(part, budget)) for part in parts)

    def _budget(self, wanted: int | None) -> int:
        if wanted is not None and wanted < 1:
            raise ValueError("the token budget must be positive")
        return PASS_TOKENS[self.device.type] if wanted is None else wanted

    def _within(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Return ``work(model, *arguments)``, run while the weights that it uses are whole."""
        out = self.whole(work, *arguments)
        if self.world is not None and not torch.is_grad_enabled():
            # No backward pass follows that would divide the last of them again.
            self.whole.reshard()
        return out

    def train(
        self,
        rows: Sequence[Row],
        token_budget: int | None = None,
        config: LossConfig | None = None,
    ) -> StepResult:
        """Make one optimizer step on these rows, on all processes: see :meth:`step`.

        ``token_budget`` bounds one process's forward pass; None: what suits the device.
        """
        total = count_trained(rows)
        if self.leader is None or not total:
            # Without trained tokens it fails before the other processes get the command, which
            # would end them.
            return self.step(self.plan(rows, token_budget), total, config)
        parts, count = self.shares(rows, self.leader.world.size, token_budget)
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
                return self.step(self.plan(parts[0], token_budget, count), total, config)
        except GradientNotFinite:
            if found:
                raise FloatingPointError(found[0]) from None
            raise

    def step(
        self,
        batches: Sequence[Batch | Pass],
        total_tokens: int,
        config: LossConfig | None = None,
    ) -> StepResult:
        """Make one optimizer step over all micro-batches: accumulate, clip, update.

        ``batches`` are passes of :meth:`plan`, or padded rows; they carry ``advantages`` and
        ``temperatures``. ``total_tokens`` is N over all micro-batches and ranks. pi_prox is the
        policy before the step. But for rounding the result does not depend on how rows are split
        into batches.

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
        self, batches: Sequence[Batch | Pass], total_tokens: int, config: LossConfig
    ) -> LossStats:
        """Add the gradient of every micro-batch's share of the loss to the parameters' ``grad``."""
        stats = LossStats()
        self._cause = None
        passes = [one if isinstance(one, Pass) else padded_pass(one) for one in batches]
        for done in self._run(passes):
            outputs, gradients = done.tree.collected() if done.tree is not None else ([], [])
            part = LossStats()
            if len(done.items):
                loss, part = self._loss(done, total_tokens, config)
                outputs, gradients = [loss, *outputs], [None, *gradients]
            part.tokens_computed = passes[done.number].ids.numel()
            part.tokens_in_rows = passes[done.number].row_tokens
            self.clock.lap("forward")
            torch.autograd.backward(outputs, gradients)
            self.clock.lap("backward")
            stats = stats + part
        return stats if self.world is None else summed(stats, self.world)

    def _run(self, passes: Sequence[Pass]) -> Iterator[Computed]:
        """Run the passes forward, and yield each when those that descend from it are done.

        So a caller that runs each backward at once has the gradients of a pass's keys and values
        together. Only the passes on the way to the current one are retained.
        """
        opened: list[tuple[int, Pass, TreePass | None, Tensor | None]] = []

        def close() -> Computed:
            number, work, tree, hidden = opened.pop()
            chunk = self.head_chunk
            if hidden is None:
                logprobs, entropies = self._within(pass_logprobs, work, tree, chunk)
            else:
                logprobs, entropies = self._within(logprobs_of, hidden, work.items, chunk)
            return Computed(number, work.items, tree, logprobs, entropies)

        for number, one in enumerate(passes):
            while opened and opened[-1][0] != one.parent:
                yield close()
            work, tree, hidden = one.to(self.device), None, None
            if work.depths is not None:
                past = [ancestor for _, _, ancestor, _ in opened if ancestor is not None]
                tree = TreePass(work.blocks, int(work.depths.max()), past, work.keeps)
            if work.keeps:
                hidden = self._within(hidden_of, work, tree)
            opened.append((number, work, tree, hidden))
        while opened:
            yield close()

    def _loss(
        self, done: Computed, total_tokens: int, config: LossConfig
    ) -> tuple[Tensor, LossStats]:
        inputs = done.items.inputs
        if not inputs:
            # An idle batch takes part in the collective operations, and adds nothing.
            return 0.0 * done.logprobs.sum(), LossStats()
        try:
            return LOSSES.find(config.name)(
                done.logprobs,
                inputs["logprobs"],
                inputs["advantages"],
                total_tokens=total_tokens,
                config=config,
                entropies=done.entropies,
                place=lambda i: f"micro-batch {done.number}, {done.items.place(i)}",
            )
        except FloatingPointError as error:
            if self.world is None:
                raise
            # The others wait for this process's gradient: NaN tells them all.
            self._cause = self._cause or error
            return math.nan * done.logprobs.sum(), LossStats()

    def _suitable_chunk(self) -> int:
        if self.device.type != "cpu":
            return MAX_HEAD_CHUNK
        vocabulary: int = self.model.get_output_embeddings().weight.shape[0]
        return min(MAX_HEAD_CHUNK, max(_CPU_LOGITS // vocabulary, 1))

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
    """Prepare a model for training: with the adapter to train, if any, no dropout, on its device,
    divided among the processes."""
    if config.lora is not None:
        add_adapter(model, config.lora)
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
