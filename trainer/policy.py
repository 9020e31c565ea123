"""The model being trained, its optimizer, and its steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.command_channel import Leader
from trainer.lora import BaseWeights, merged
from trainer.loss import (
    LOSSES,
    LossConfig,
    LossInputs,
    LossStats,
    needs_clipped_ratio,
    needs_rejections,
    needs_sequence_product,
    needs_sequence_ratio,
    needs_sequence_weight,
    teacher_term,
)
from trainer.model import PolicyConfig, loaded, prepared, world_for
from trainer.packing import Pass, Shape
from trainer.pass_runner import Computed, PassRunner, Teacher
from trainer.rows import Row, count_trained, with_values
from trainer.step_clock import StepClock
from trainer.updates import (
    Minibatch,
    ReferenceLogprobs,
    Snapshot,
    StepConfig,
    with_clipped_ratios,
    with_high_entropies,
    with_outliers,
    with_rejections,
    with_sequence_means,
    with_sequence_products,
)
from trainer.weight_buckets import Bucket, in_buckets, stored_tensors
from trainer.world import UnshardedModel, World, summed, whole_tensor


@dataclass(frozen=True, slots=True)
class StepResult:
    """One train step: its optimizer updates, and means over them.

    ``stats`` are sums over the updates but for the loss. ``grad_norm`` is the global L2 norm before
    clipping.
    """

    stats: LossStats
    grad_norm: float
    learning_rate: float
    updates: int = 1


class GradientNotFinite(FloatingPointError):
    """A gradient that is not finite, although this process's log-probabilities are."""


class Policy:
    """A causal language model, its AdamW, and the number of train steps made.

    A train step trains on one batch, by one optimizer update or by several.

    ``model`` is a transformers causal LM, its parameters the float32 master copy. Dropout is off:
    the trained policy must be the one that sampled. No method draws random numbers: the same
    weights, optimizer state and batches give the same step, bit for bit (on one kind of machine,
    with one number of processes; of compiled kernels, in one process).

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
            weight_decay=self.config.weight_decay,
        )
        self.steps = 0
        self.clock = StepClock(self.device)
        """The seconds of packing, forward and backward passes, and optimizer."""
        self._cause: FloatingPointError | None = None
        """The first value of the current step on this process that is not finite."""
        self.runner = PassRunner(self.whole, self.device, self.config, world)
        """Runs the passes of this model."""
        self.reference: ReferenceLogprobs | None = None
        """Returns what the KL term of the loss compares this model with."""
        self.teacher: Teacher | None = None
        """The model from which the loss distils."""

    @classmethod
    def load(
        cls, source: str | Path, config: PolicyConfig | None = None, world: World | None = None
    ) -> Policy:
        """Load from a local folder or a hub name, safetensors only, in float32.

        Raises StartupError for missing weights, which transformers would draw at random.
        """
        config = config or PolicyConfig()
        world = world_for(config, world)
        policy = cls(loaded(source, config, world), config, world)
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

    def train(
        self,
        rows: Sequence[Row],
        token_budget: int | None = None,
        config: LossConfig | None = None,
        settings: StepConfig | None = None,
        minibatches: Sequence[Sequence[int]] | None = None,
    ) -> StepResult:
        """Make one train step on these rows, on all processes: see :meth:`step`.

        ``token_budget`` bounds one process's forward pass; None: what suits this one's device.
        ``minibatches`` has the numbers of each one's rows; None: all rows are one.
        """
        budget = self.runner.budget(token_budget)
        parts = [[rows[k] for k in part] for part in minibatches or [range(len(rows))]]
        totals = [count_trained(part) for part in parts]
        if self.leader is None or not all(totals):
            # Without trained tokens it fails before the other processes get the command, which
            # would end them.
            work = [Minibatch(part, total) for part, total in zip(parts, totals, strict=True)]
            return self.step(work, budget, config, settings)
        shares = [self.runner.shares(part, self.leader.world.size, budget) for part in parts]
        command = {
            "do": "step",
            "budget": budget,
            "minibatches": [
                {"tokens": total, "shapes": shapes, "rows": [len(part) for part in by_rank]}
                for total, (by_rank, shapes) in zip(totals, shares, strict=True)
            ],
            "loss": asdict(config or LossConfig()),
            "settings": asdict(settings or StepConfig()),
        }
        every = zip(*(by_rank for by_rank, _ in shares), strict=True)
        by_rank = [[row for part in mine for row in part] for mine in every]
        with self.leader.run(command, by_rank):
            return self.step_commanded(command, by_rank[0])

    def step_commanded(self, command: Mapping[str, Any], rows: Sequence[Row]) -> StepResult:
        """Make this process's part of a step that :meth:`train` commands, with its rows."""
        assert self.world is not None
        left, minibatches = iter(rows), []
        for one in command["minibatches"]:
            mine = list(islice(left, one["rows"][self.world.rank]))
            minibatches.append(Minibatch(mine, one["tokens"], one["shapes"]))
        settings = StepConfig(**command["settings"])
        return self.step(minibatches, command["budget"], LossConfig(**command["loss"]), settings)

    def step(
        self,
        minibatches: Sequence[Minibatch],
        token_budget: int,
        config: LossConfig | None = None,
        settings: StepConfig | None = None,
    ) -> StepResult:
        """Make one train step: an optimizer update for each minibatch, in each of the epochs.

        The rows carry ``advantages`` and ``temperatures``. pi_prox is the policy before the first
        update. But for rounding the result does not depend on how rows are split into passes.

        All processes of a world must call it together. The statistics are those of all processes.

        Raises ValueError for a minibatch without trained tokens; FloatingPointError, weights and
        optimizer as they were, where a log-probability, the loss or the gradient of an update is
        not finite, on every process of a world.
        """
        config, settings = config or LossConfig(), settings or StepConfig()
        if not minibatches or not all(one.tokens for one in minibatches):
            raise ValueError("there is nothing to train on")
        count = settings.epochs * len(minibatches)
        before = Snapshot(self.optimizer) if count > 1 else None
        try:
            work = [self._with_fixed(one, token_budget, config, count) for one in minibatches]
            done: list[StepResult] = []
            while len(done) < count:
                one = work[len(done) % len(work)]
                one = self._with_current(one, token_budget, config, first=not done)
                passes = self.runner.plan(one.rows, token_budget, one.shapes)
                self.clock.lap("pack")
                done.append(self._update(passes, one.tokens, config, settings))
        except BaseException:
            if before is not None:
                before.restore()
            raise
        self.steps += 1
        return _together(done)

    def _with_fixed(
        self, work: Minibatch, token_budget: int, config: LossConfig, updates: int
    ) -> Minibatch:
        """Return the minibatch with what the loss wants to know of other policies than the current
        one."""
        rows, how = work.rows, (token_budget, work.shapes)
        if config.kl_coef:
            if self.reference is None:
                raise ValueError("the loss's KL term needs a reference model")
            rows = with_values(rows, "reference", self._of_rows(self.reference, rows, *how))
        if updates > 1 or needs_sequence_weight(config) or needs_rejections(config):
            proximal = self._of_rows(self.runner.logprobs, rows, *how)
            if updates > 1:
                rows = with_values(rows, "proximal", proximal)
            if needs_sequence_weight(config):
                rows = with_sequence_means(rows, "sequence_log_weight", proximal, "logprobs")
            if needs_rejections(config):
                rows = with_rejections(rows, proximal, config)
        return replace(work, rows=rows)

    def _with_current(
        self, work: Minibatch, token_budget: int, config: LossConfig, *, first: bool
    ) -> Minibatch:
        """Return the minibatch with what the loss wants to know of the policy before an update."""
        rows, how = work.rows, (token_budget, work.shapes)
        if config.top_entropy < 1:
            entropies = self._of_rows(self.runner.entropies, rows, *how)
            rows = with_high_entropies(rows, entropies, config.top_entropy, self.world)
        ratio = needs_sequence_ratio(config) and not first
        clipped = needs_clipped_ratio(config) and not first
        product = needs_sequence_product(config)
        moment = config.second_moment
        if product or ratio or clipped or moment is not None:
            now = self._of_rows(self.runner.logprobs, rows, *how)
            if ratio:
                rows = with_sequence_means(rows, "sequence_log_ratio", now, "proximal")
            if clipped:
                rows = with_clipped_ratios(rows, now, config)
            if moment is not None:
                rows = with_outliers(rows, now, moment, self.world)
            if product:
                rows = with_sequence_products(rows, now, config)
        return replace(work, rows=rows)

    def _of_rows(
        self,
        compute: ReferenceLogprobs,
        rows: Sequence[Row],
        token_budget: int,
        shapes: Sequence[Shape],
    ) -> list[Tensor]:
        found = self.runner.of_rows(compute, rows, token_budget, shapes)
        self.clock.lap("forward")
        return found

    def _update(
        self, passes: Sequence[Pass], total_tokens: int, config: LossConfig, settings: StepConfig
    ) -> StepResult:
        """Accumulate the gradient of the passes, clip it, and let the optimizer move the weights.

        ``total_tokens`` is N over all passes and processes.
        """
        given = {name: getattr(settings, name) for name in ("lr", "betas", "weight_decay")}
        for group in self.optimizer.param_groups:
            group |= {name: value for name, value in given.items() if value is not None}
        self.optimizer.zero_grad(set_to_none=True)
        try:
            stats = self.accumulate(passes, total_tokens, config)
            norm = float(
                whole_tensor(
                    nn.utils.clip_grad_norm_(
                        [p for p in self.model.parameters() if p.requires_grad],
                        self.config.grad_clip if settings.grad_clip is None else settings.grad_clip,
                    ),
                    self.device,
                )
            )
            if not math.isfinite(norm):
                raise self._cause or GradientNotFinite(
                    f"the gradient's norm is {norm} at step {self.steps}"
                )
            self.optimizer.step()
        finally:
            self.optimizer.zero_grad(set_to_none=True)
            self.clock.lap("optimizer")
        return StepResult(stats, norm, float(self.optimizer.param_groups[0]["lr"]))

    def accumulate(
        self, passes: Sequence[Pass], total_tokens: int, config: LossConfig
    ) -> LossStats:
        """Add the gradient of every pass's share of the loss to the parameters' ``grad``."""
        stats = LossStats()
        self._cause = None
        taught = None
        if config.teacher_coef:
            if self.teacher is None:
                raise ValueError("the loss's distillation needs a teacher")
            taught = self.teacher.of_passes(passes, config.teacher_kind)
        entropy_gradient = config.entropy_coef > 0
        for done in self.runner.run(passes, entropy_gradient=entropy_gradient, taught=taught):
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

    def _loss(
        self, done: Computed, total_tokens: int, config: LossConfig
    ) -> tuple[Tensor, LossStats]:
        inputs = done.items.inputs
        if not inputs:
            # An idle batch takes part in the collective operations, and adds nothing.
            return 0.0 * done.logprobs.sum(), LossStats()

        def place(i: int) -> str:
            return f"micro-batch {done.number}, {done.items.place(i)}"

        given = LossInputs.of(inputs)
        try:
            loss, stats = LOSSES.find(config.name)(
                done.logprobs,
                given,
                total_tokens=total_tokens,
                config=config,
                entropies=done.entropies,
                place=place,
            )
            if done.divergences is not None:
                more = teacher_term(done.divergences, given, total_tokens, config, place)
                loss = loss + more
                stats.loss += float(more.detach())
                stats.teacher_kl = float(done.divergences.detach().sum())
            return loss, stats
        except FloatingPointError as error:
            if self.world is None:
                raise
            # The others wait for this process's gradient: NaN tells them all.
            self._cause = self._cause or error
            return math.nan * done.logprobs.sum(), LossStats()


def _together(updates: Sequence[StepResult]) -> StepResult:
    """Return the result of a train step of these updates."""
    count = len(updates)
    stats = sum((one.stats for one in updates), LossStats())
    stats.loss /= count
    norm = sum(one.grad_norm for one in updates) / count
    return StepResult(stats, norm, updates[-1].learning_rate, count)
