"""The checks at load of how a model computes rows: as a tree of tokens, in batches, or alone; and
by layers that torch.compile fuses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import MethodType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface

from any_agent.errors import StartupError
from trainer.compiling import compiled, reason_of
from trainer.logprobs import hidden_of
from trainer.model import context_of
from trainer.packing import Items, Pass, padded_passes, tree_passes
from trainer.rows import Row, written_row
from trainer.tree_attention import NAME, TreePass, tree_attention
from trainer.world import layers_of

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""The relative difference between hidden states, computed in two ways, that is rounding."""
_COARSE_TOLERANCE = 0.05
"""The same of a smaller type."""
_COARSE_TOLERANCE_OF_LAYERS = 0.1
"""Kernels by themselves round where fused ones do not."""
_LAYER_TOKENS = 4096
"""The most tokens of a pass that is tried with fused layers."""


class ModelProbe:
    """The checks of one model, which a :class:`trainer.pass_runner.PassRunner` has just got.

    ``run(work, *arguments)`` returns ``work(model, *arguments)``, and ``dtype`` is the type that
    the model computes in. In a world all processes must make each check together.
    """

    def __init__(
        self, model: Any, run: Callable[..., Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._model, self._run, self._dtype, self._device = model, run, dtype, device
        self._name = type(model).__name__
        self._vocabulary: int = model.get_input_embeddings().weight.shape[0]

    def neighbours_reason(self) -> str | None:
        """Return the reason if a row's hidden states depend on the rows beside it; None if not.

        A row is computed alone, and beside longer ones of few different tokens, in the mode in
        which the model is trained: experts of limited capacity would be full then. Positions are
        rotated in a short row alone, and beside one as long as the context. Raises StartupError for
        a model that computes the same row differently each time.
        """
        row = self._row(range(1, 9))
        beside = [self._row([k] * 32) for k in range(1, 5)]
        with torch.no_grad():
            like = torch.zeros(1, dtype=self._dtype, device=self._device)
            context = context_of(self._model)
            modules = self._model.modules()
            if context and any(rotates_by_length(one, context, like) for one in modules):
                return f"{self._name} scales positions by the longest row of a batch"
            alone, again, among = (
                self._hidden(one.to(self._device))[-1, : len(row["input_ids"])].double()
                for rows in ([row], [row], [row, *beside])
                for one in padded_passes(rows, 1024)
            )
        if error := self._error(again, alone):
            raise StartupError(
                f"{self._name} computes other hidden states each time that it gets the same row "
                f"(by {error}): set the rates of dropout and noise to 0 in its config.json, or "
                "train.gradient_checkpointing=false"
            )
        if error := self._error(among, alone):
            return (
                f"{self._name} computes other hidden states of a row beside other rows (by {error})"
            )
        return None

    def use_tree_attention(self) -> str | None:
        """Switch to attention over trees; None, or the reason why the model stays as it was."""
        before = self._model.config._attn_implementation
        reason = _by_config(self._model, before)
        if reason is not None:
            return reason
        try:
            self._model.set_attn_implementation(NAME)
            reason = self._tree_reason()
        except Exception as error:
            # Whatever a foreign model makes of it, rows are right.
            reason = f"{self._name} cannot share prefixes ({error})"
        if reason is not None:
            self._model.set_attn_implementation(before)
        return reason

    def _tree_reason(self) -> str | None:
        # They branch twice, and one of them is a prefix of another.
        branches = [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 6, 5, 3], [1, 2, 9, 4], [1, 2, 3, 4, 5]
        rows = [self._row(ids) for ids in branches]
        (by_rows,) = padded_passes(rows, 1024)
        (by_tree,) = tree_passes(rows, 1024)
        by_rows, by_tree = by_rows.to(self._device), by_tree.to(self._device)
        tree = TreePass(by_tree.blocks, len(rows[0]["input_ids"]))
        with torch.no_grad():
            expected = self._hidden(by_rows).flatten(0, 1)[_in_order(by_rows.items)].double()
            found = self._run(hidden_of, by_tree, tree)[0][_in_order(by_tree.items)].double()
        layers = self._model.config.get_text_config().num_hidden_layers
        if len(tree.layers) != layers:
            return (
                f"{len(tree.layers)} of {layers} layers of {self._name} use the attention function"
            )
        if error := self._error(found, expected):
            return f"{self._name} computes other hidden states over shared prefixes (by {error})"
        return None

    def use_compiled_layers(self, packing: Literal["tree", "rows"], tokens: int) -> str | None:
        """Compile the layers, in place; None, or the reason why they stay as they are.

        Norms, rotations and activations become few kernels; attention over trees stays one call. A
        pass of some thousand ``tokens``, at most as many as given, is computed before and after,
        and backward where there is something to train, which compiles the kernels. Raises
        StartupError for layers that cannot be compiled, or compute otherwise then.
        """
        layers = layers_of(self._model)
        # A recurrent layer is a loop over tokens, unless a kernel for it is installed: it would be
        # compiled for minutes, for each length.
        if reason := other_layers(self._model):
            return reason
        if not layers:
            return f"the layers of {self._name} are not known"
        passes = [one.to(self._device) for one in self._passes(packing, tokens)]
        with torch.no_grad():
            expected = [self._hidden(one) for one in passes]
        AttentionInterface.register(NAME, torch.compiler.disable(tree_attention))  # type: ignore[no-untyped-call]
        for layer in layers:
            _compile(layer)
        trains = any(p.requires_grad for p in self._model.parameters())
        advice = "set train.compile=false"
        for one, before in zip(passes, expected, strict=True):
            try:
                with torch.set_grad_enabled(trains):
                    after = self._hidden(one)
                    if trains:
                        torch.autograd.backward(after.float().sum())
            except Exception as error:
                # The weights are gathered now, which nothing in torch 2.11 undoes.
                raise StartupError(
                    f"the layers of {self._name} cannot be compiled ({reason_of(error)}): {advice}"
                ) from error
            if difference := self._error(after.detach(), before, _COARSE_TOLERANCE_OF_LAYERS):
                raise StartupError(
                    f"the layers of {self._name} compute otherwise when compiled (by "
                    f"{difference}): {advice}"
                )
        self._model.zero_grad(set_to_none=True)
        return None

    def _passes(self, packing: Literal["tree", "rows"], tokens: int) -> list[Pass]:
        """Return a pass over one row, and, as rows are computed by themselves, one over two."""
        context = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        length = min(_LAYER_TOKENS, tokens, context or 2)
        whole, half = self._row(range(length)), self._row(range(max(length // 2, 2)))
        if packing == "tree":
            return tree_passes([whole], length)
        return [*padded_passes([whole], length), *padded_passes([half, half], length)]

    def _row(self, ids: Iterable[int]) -> Row:
        """Return a row of these token ids, every token trained that has a predecessor."""
        known = [id % self._vocabulary for id in ids]
        return written_row(known, [0, *[1] * (len(known) - 1)], advantage=0.0)

    def _hidden(self, one: Pass) -> Tensor:
        tree = TreePass(one.blocks, int(one.depths.max())) if one.depths is not None else None
        return self._run(hidden_of, one, tree)

    def _error(self, found: Tensor, expected: Tensor, coarse: float = _COARSE_TOLERANCE) -> str:
        """Return the relative difference; "" if it is rounding, ``coarse`` of small types."""
        error = float((found - expected).norm() / expected.norm())
        # Also where one is not finite.
        return "" if error <= _TOLERANCE.get(self._dtype, coarse) else f"{error:.1e}"


def rotates_by_length(module: Any, context: int, like: Tensor) -> bool:
    """Return True for a rotary embedding whose angles depend on the greatest position."""
    kinds = getattr(module, "rope_type", None)
    if kinds is None:
        return False
    for given in [{"layer_type": kind} for kind in kinds] if isinstance(kinds, dict) else [{}]:
        short = torch.arange(8, device=like.device)[None]
        far = torch.cat([short, torch.full_like(short[:, :1], context - 1)], dim=1)
        try:
            one, other = (module(like, positions, **given) for positions in (short, far))
        except TypeError:
            # It takes other arguments; the rows of the probe are all that is known of it.
            continue
        if isinstance(one, tuple):
            one, other = one[0], other[0]
        if not torch.equal(one, other[..., :8, :]):
            return True
    return False


def _by_config(model: Any, attention: str) -> str | None:
    config, name = model.config.get_text_config(), type(model).__name__
    if attention not in ("sdpa", NAME):
        return f"{name} is loaded with the attention {attention}, not sdpa"
    if reason := other_layers(model):
        return reason
    types = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in types or not types
    if window is None or not slides or getattr(config, "use_sliding_window", None) is False:
        return None
    context = config.max_position_embeddings
    if window < context:
        return f"{name} attends to a window of {window} tokens in a context of {context}"
    return None


def other_layers(model: Any) -> str | None:
    """Return the reason if a model has other layers than attention, as recurrent ones."""
    config, name = model.config.get_text_config(), type(model).__name__
    types = set(getattr(config, "layer_types", None) or ())
    if odd := sorted(types - {"full_attention", "sliding_attention"}):
        return f"{name} has layers of other kinds than plain attention ({', '.join(odd)})"
    return None if hasattr(config, "num_attention_heads") else f"{name} has no attention"


def _in_order(items: Items) -> Tensor:
    """Return the items' sources, sorted by their rows and positions."""
    order = np.lexsort((items.positions.cpu().numpy(), items.sequences.cpu().numpy()))
    return items.sources[torch.from_numpy(order).to(items.sources.device)]


def _compile(layer: Any) -> None:
    if not (layer.training and getattr(layer, "gradient_checkpointing", False)):
        layer.forward = compiled(layer.forward, dynamic=True)
        return
    # transformers checkpoints within forward, and a compiled checkpoint may not call anything that
    # is not: the layer is compiled within it. Its class has the layer's own forward wrapped.
    checkpoint = layer._gradient_checkpointing_func
    inner = compiled(MethodType(type(layer).forward.__wrapped__, layer), dynamic=True)

    def checkpointed(forward: partial[Any], *arguments: Any) -> Any:
        return checkpoint(partial(inner, **forward.keywords), *arguments)

    layer._gradient_checkpointing_func = checkpointed
