"""Passes over rows: how they are planned, and how they run on a model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor

from any_agent.errors import StartupError
from trainer.logprobs import Taught, hidden_of, logprobs_of, try_fused
from trainer.model import PolicyConfig, context_of
from trainer.model_probes import ModelProbe
from trainer.packing import (
    Items,
    Pass,
    Shape,
    balanced,
    balanced_tries,
    in_common,
    micro_batches,
    padded_passes,
    require_inputs,
    tree_passes,
    tree_shape,
)
from trainer.pass_size import pass_tokens
from trainer.rows import Row, count_trained, is_trained, misfit
from trainer.tree_attention import TreePass
from trainer.world import UnshardedModel, World, added, whole_tensor

log = logging.getLogger(__name__)
T = TypeVar("T")

Packing: TypeAlias = Literal["tree", "rows", "alone"]
"""How rows are computed: shared prefixes once, padded beside each other, or each in its own pass;
each costs more than the one before it."""

MAX_HEAD_CHUNK = 1024
_CPU_LOGITS = 1 << 25
"""The most logits at a time on a CPU: 128 MiB in float32."""


@dataclass(frozen=True, slots=True)
class Computed:
    """One pass, computed forward: its items' log-probabilities and entropies, [n]."""

    number: int
    items: Items
    tree: TreePass | None
    logprobs: Tensor
    entropies: Tensor
    hidden: Tensor | None
    """The last hidden states of a pass from which others descend."""
    divergences: Tensor | None = None
    """The divergences from the teacher, [n], where there is one."""


class PassRunner:
    """Plans the passes over rows, and runs them on one model.

    In a ``world`` the model's weights are divided among processes, which gather them for each pass.
    ``tokens`` are those of a pass where a caller sets none; None: what suits the device. Raises
    StartupError for a model that changes its logits after the output head, or whose layers cannot
    be compiled.
    """

    def __init__(
        self,
        whole: UnshardedModel,
        device: torch.device,
        config: PolicyConfig,
        world: World | None,
        tokens: int | None = None,
    ) -> None:
        self._whole: Any = whole
        self._model: Any = whole.model
        self._device = device
        self._world = world
        self.pass_tokens = tokens or pass_tokens(self._model, device, config)
        self.head_chunk = config.head_chunk or self._suitable_chunk()
        computed_in = config.dtype or next(self._model.parameters()).dtype
        self.packing: Packing = config.packing
        """How rows are computed, here: `rows` also for a model that cannot share prefixes, `alone`
        for one whose rows may not even be in one batch."""
        probe = ModelProbe(self._model, self.within, computed_in, device)
        if reason := probe.neighbours_reason():
            self.packing = "alone"
            log.warning("%s: each row is a pass of its own, which costs much more", reason)
        elif config.packing == "tree" and (reason := probe.use_tree_attention()):
            self.packing = "rows"
            log.warning("%s: every row is computed by itself, which costs more", reason)
        self._require_plain_head()
        self.fused = config.compile and self._compile(probe, computed_in)
        """The layers, and what follows the head, are compiled."""

    @property
    def context(self) -> int | None:
        """The most tokens of a row, by the model's configuration; None: it does not say."""
        return context_of(self._model)

    def misfit(self, row: Row) -> tuple[str, str] | None:
        """Return why the model cannot compute a row, as :func:`trainer.rows.misfit`."""
        vocabulary: int = self._model.get_input_embeddings().weight.shape[0]
        return misfit(row, vocabulary, self.context)

    def plan(
        self,
        rows: Sequence[Row],
        token_budget: int | None = None,
        shapes: Sequence[Shape] = (),
    ) -> list[Pass]:
        """Return the passes over these rows.

        ``token_budget`` bounds the tokens of a pass; None: what suits the device. ``shapes`` are
        those of the world's processes, of :meth:`shares`; none: each has the same rows. The same
        rows, in any order, and the same settings make the same plan. Raises ValueError for token
        ids and positions that the model does not have.
        """
        self._require_fitting(rows)
        make = tree_passes if self.packing == "tree" else padded_passes
        passes = make(rows, self.budget(token_budget))
        if self._world is None:
            return passes
        shapes = shapes or [[one.parent for one in passes]]
        return in_common(passes, shapes, self._world.rank % len(shapes))

    def _compile(self, probe: ModelProbe, dtype: torch.dtype) -> bool:
        """Compile the head's part, then the layers; False, with a warning, if this cannot be."""
        vocabulary = self._model.get_output_embeddings().weight.shape[0]
        reason = try_fused(self.head_chunk, vocabulary, dtype, self._device)
        if self._world is not None and added(torch.tensor(int(reason is not None)), self._world):
            reason = reason or "torch.compile does not work in another process"
        if reason is None:
            packing: Literal["tree", "rows"] = "tree" if self.packing == "tree" else "rows"
            reason = probe.use_compiled_layers(packing, self.pass_tokens)
        if reason is not None:
            log.warning("%s: nothing is compiled, which is slower on a GPU", reason)
        return reason is None

    def shares(
        self, rows: Sequence[Row], processes: int, token_budget: int | None = None
    ) -> tuple[list[list[Row]], list[Shape]]:
        """Return the rows of each process, and the shapes of their passes.

        Raises as :meth:`plan`, before another process gets its rows.
        """
        self._require_fitting(rows)
        budget = self.budget(token_budget)
        if self.packing != "tree":
            parts = balanced(rows, processes)
            return parts, [[-1] * len(micro_batches(part, budget)) for part in parts]
        parts = balanced_tries(rows, processes)
        return parts, [tree_shape(part, budget) for part in parts]

    def run(
        self,
        passes: Sequence[Pass],
        *,
        entropy_gradient: bool = False,
        taught: Iterator[Taught] | None = None,
    ) -> Iterator[Computed]:
        """Run the passes forward, and yield each when those that descend from it are done.

        So a caller that runs each backward at once has the gradients of a pass's keys and values
        together. Only the passes on the way to the current one are retained. ``taught`` is
        :meth:`Teacher.of_passes` of the same passes.
        """

        def finish(
            number: int, work: Pass, tree: TreePass | None, hidden: Tensor | None
        ) -> Computed:
            how = (self.head_chunk, self.fused, entropy_gradient)
            theirs = None if taught is None else next(taught)
            logprobs, entropies, divergences = self.within(
                logprobs_of, hidden, work, tree, *how, theirs
            )
            return Computed(number, work.items, tree, logprobs, entropies, hidden, divergences)

        return self._descend(passes, finish)

    def hidden_states(self, passes: Sequence[Pass]) -> Iterator[Tensor]:
        """Yield the last hidden states of each pass in the order of :meth:`run`, without gradient.

        Nothing is computed before it is asked for.
        """

        def finish(number: int, work: Pass, tree: TreePass | None, hidden: Tensor | None) -> Tensor:
            found: Tensor = self.within(hidden_of, work, tree) if hidden is None else hidden
            return found

        found = self._descend(passes, finish)
        while True:
            # Only while it computes: the caller's own passes have a gradient.
            with torch.no_grad():
                hidden = next(found, None)
            if hidden is None:
                return
            yield hidden

    def _descend(
        self,
        passes: Sequence[Pass],
        finish: Callable[[int, Pass, TreePass | None, Tensor | None], T],
    ) -> Iterator[T]:
        """Yield what ``finish`` makes of each pass, its attention, and its hidden states where
        others descend from it."""
        opened: list[tuple[int, Pass, TreePass | None, Tensor | None]] = []
        parents = {one.parent for one in passes}

        for number, one in enumerate(passes):
            while opened and opened[-1][0] != one.around:
                yield finish(*opened.pop())
            work, tree, hidden = one.to(self._device), None, None
            if work.depths is not None:
                above = next((tree for k, _, tree, _ in opened if k == one.parent), None)
                past = [] if above is None else [*above.past, above]
                tree = TreePass(work.blocks, int(work.depths.max()), past, number in parents)
            if work.keeps:
                hidden = self.within(hidden_of, work, tree)
            opened.append((number, work, tree, hidden))
        while opened:
            yield finish(*opened.pop())

    def logprobs(self, passes: Sequence[Pass]) -> list[Tensor]:
        """Return the log-probabilities of each pass's items, [n], float, in the machine's memory.

        No gradient is kept. In a world all processes must call it together.
        """
        return self._without_gradient(passes, "logprobs")

    def entropies(self, passes: Sequence[Pass]) -> list[Tensor]:
        """Return the entropies at each pass's items, as :meth:`logprobs`."""
        return self._without_gradient(passes, "entropies")

    def _without_gradient(self, passes: Sequence[Pass], what: str) -> list[Tensor]:
        with torch.no_grad():
            found = {done.number: getattr(done, what).cpu() for done in self.run(passes)}
        return [found[number] for number in range(len(passes))]

    def row_logprobs(self, rows: Sequence[Row], token_budget: int | None = None) -> list[Tensor]:
        """Return the log-probabilities of each row's trained tokens, as :meth:`of_rows`."""
        return self.of_rows(self.logprobs, rows, token_budget)

    def of_rows(
        self,
        compute: Callable[[Sequence[Pass]], list[Tensor]],
        rows: Sequence[Row],
        token_budget: int | None = None,
        shapes: Sequence[Shape] = (),
    ) -> list[Tensor]:
        """Return what ``compute`` returns of each row's trained tokens, [their number], float.

        ``compute`` is :meth:`logprobs` or :meth:`entropies`, of this or of another model. Each row
        states its temperature. In a world all processes must call it together, each with its own
        rows and the ``shapes`` of all.
        """
        passes = self.plan(rows, token_budget, shapes)
        found = [
            (one.items.sequences, one.items.positions, values)
            for one, values in zip(passes, compute(passes), strict=True)
            if one.items.inputs
        ]
        counts = [count_trained([row]) for row in rows]
        if not found:
            return [torch.zeros(0) for _ in rows]
        parts = zip(*found, strict=True)
        sequences, positions, values = (torch.cat(part) for part in parts)
        order = np.lexsort((positions.numpy(), sequences.numpy()))
        return list(torch.split(values[torch.from_numpy(order)], counts))

    def within(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Return ``work(model, *arguments)``, run while the weights that it uses are whole."""
        out = self._whole(work, *arguments)
        if self._world is not None and not torch.is_grad_enabled():
            # No backward pass follows that would divide the last of them again.
            self._whole.reshard()
        return out

    @property
    def chosen(self) -> dict[str, int]:
        """The choice of ``pass_tokens``, for a record: a repeated step has the same passes."""
        return {self._device.type: self.pass_tokens}

    def compute_like(self, other: PassRunner) -> None:
        """Compute rows as another model does, too, if that costs more: passes suit both then."""
        self.packing = max(self.packing, other.packing, key=get_args(Packing).index)

    def choose_as(self, recorded: Mapping[str, int]) -> None:
        """Choose the tokens of a pass as recorded, unless that was on another kind of device."""
        self.pass_tokens = recorded.get(self._device.type, self.pass_tokens)

    def budget(self, wanted: int | None) -> int:
        """Return the tokens of a pass: those that a caller sets, else what suits the device."""
        if wanted is not None and wanted < 1:
            raise ValueError("the token budget must be positive")
        if self.packing == "alone":
            return 1
        return self.pass_tokens if wanted is None else wanted

    def _require_fitting(self, rows: Sequence[Row]) -> None:
        """Raise ValueError for rows that cannot be computed, or not together; so a token id or a
        position that the model lacks does not end a GPU's process."""
        require_inputs([row for row in rows if is_trained(row)])
        for k, row in enumerate(rows):
            if (found := self.misfit(row)) is not None:
                raise ValueError(f"row {k} {found[1]}")

    def _suitable_chunk(self) -> int:
        if self._device.type != "cpu":
            return MAX_HEAD_CHUNK
        vocabulary: int = self._model.get_output_embeddings().weight.shape[0]
        return min(MAX_HEAD_CHUNK, max(_CPU_LOGITS // vocabulary, 1))

    def _require_plain_head(self) -> None:
        """Raise StartupError for a model that changes its logits after the head, as by a cap."""
        vocabulary = self._model.get_output_embeddings().weight.shape[0]
        ids = torch.arange(1, 5, device=self._device)[None] % vocabulary
        with torch.no_grad():
            whole, parts = self.within(_logits_in_two_ways, ids)
        bent = getattr(self._model.config.get_text_config(), "final_logit_softcapping", None)
        if bent or not torch.allclose(whole, parts, rtol=1e-6, atol=1e-6):
            raise StartupError(
                f"{type(self._model).__name__} changes its logits after the output head; "
                "such models cannot be trained yet"
            )


@dataclass(frozen=True, slots=True)
class Teacher:
    """A frozen model with the policy's token ids, whose whole distributions the loss compares."""

    runner: PassRunner
    weight: Tensor
    """The output head, whole in every process, as the policy's backward passes use it."""
    bias: Tensor | None

    @classmethod
    def of(cls, whole: UnshardedModel, runner: PassRunner, device: torch.device) -> Self:
        """Return the teacher; all processes of a world must call it together."""
        head: Any = whole.model.get_output_embeddings()
        weight = whole_tensor(head.weight.detach(), device)
        bias: Tensor | None = getattr(head, "bias", None)
        if bias is not None:
            bias = whole_tensor(bias.detach(), device)
        return cls(runner, weight, bias)

    def of_passes(self, passes: Sequence[Pass], kind: str) -> Iterator[Taught]:
        """Yield what it teaches in each pass, in the order of :meth:`PassRunner.run`."""
        for hidden in self.runner.hidden_states(passes):
            yield Taught(hidden, self.weight, self.bias, kind == "forward")


def _logits_in_two_ways(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    body = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return model(input_ids=ids, use_cache=False).logits, model.get_output_embeddings()(body)
