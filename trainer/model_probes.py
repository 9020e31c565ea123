"""The checks at load of how a model computes rows: as a tree of tokens, in batches, or alone; and
by layers that torch.compile fuses.

In each check ``run(work, *arguments)`` returns ``work(model, *arguments)``, and ``dtype`` is the
type that the model computes in. In a world all processes must call it together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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


def neighbours_reason(
    model: Any,
    run: Callable[..., Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> str | None:
    """Return the reason if a row's hidden states depend on the rows beside it; None if they do not.

    A row is computed alone, and beside longer ones of few different tokens, in the mode in which
    the model is trained: experts of limited capacity would be full then. Positions are rotated in
    a short row alone, and beside one as long as the context. Raises StartupError for a model that
    computes the same row differently each time.
    """
    name = type(model).__name__
    vocabulary = model.get_input_embeddings().weight.shape[0]
    row = trained_row([k % vocabulary for k in range(1, 9)])
    beside = [trained_row([k % vocabulary] * 32) for k in range(1, 5)]
    with torch.no_grad():
        like = torch.zeros(1, dtype=dtype, device=device)
        context = context_of(model)
        if context and any(_rotates_by_length(one, context, like) for one in model.modules()):
            return f"{name} scales positions by the longest row of a batch"
        alone, again, among = (
            _hidden(run, one.to(device))[-1, : len(row["input_ids"])].double()
            for rows in ([row], [row], [row, *beside])
            for one in padded_passes(rows, 1024)
        )
        if (error := _difference(again, alone)) > _TOLERANCE.get(dtype, _COARSE_TOLERANCE):
            raise StartupError(
                f"{name} computes other hidden states each time that it gets the same row (by "
                f"{error:.1e}): set the rates of dropout and noise to 0 in its config.json, or "
                "train.gradient_checkpointing=false"
            )
        if (error := _difference(among, alone)) > _TOLERANCE.get(dtype, _COARSE_TOLERANCE):
            return (
                f"{name} computes other hidden states of a row beside other rows (by {error:.1e})"
            )
    return None


def _rotates_by_length(module: Any, context: int, like: Tensor) -> bool:
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


def _difference(found: Tensor, expected: Tensor) -> float:
    """Return the relative difference; infinite where one is not finite."""
    error = float((found - expected).norm() / expected.norm())
    return error if math.isfinite(error) else math.inf


def use_tree_attention(
    model: Any,
    run: Callable[..., Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> str | None:
    """Switch a model to attention over trees; None, or the reason why it stays as it was."""
    before = model.config._attn_implementation
    reason = _by_config(model, before)
    if reason is not None:
        return reason
    try:
        model.set_attn_implementation(NAME)
        reason = _by_probe(model, run, dtype, device)
    except Exception as error:
        # Whatever a foreign model makes of it, rows are right.
        reason = f"{type(model).__name__} cannot share prefixes ({error})"
    if reason is not None:
        model.set_attn_implementation(before)
    return reason


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


def _by_probe(
    model: Any, run: Callable[..., Tensor], dtype: torch.dtype, device: torch.device
) -> str | None:
    rows = _branching_rows(model.get_input_embeddings().weight.shape[0])
    (by_rows,) = padded_passes(rows, 1024)
    (by_tree,) = tree_passes(rows, 1024)
    by_rows, by_tree = by_rows.to(device), by_tree.to(device)
    tree = TreePass(by_tree.blocks, len(rows[0]["input_ids"]))
    with torch.no_grad():
        expected = _hidden(run, by_rows).flatten(0, 1)[_in_order(by_rows.items)].double()
        found = run(hidden_of, by_tree, tree)[0][_in_order(by_tree.items)].double()
    name, layers = type(model).__name__, model.config.get_text_config().num_hidden_layers
    if len(tree.layers) != layers:
        return f"{len(tree.layers)} of {layers} layers of {name} use the attention function"
    if (error := _difference(found, expected)) > _TOLERANCE.get(dtype, _COARSE_TOLERANCE):
        return f"{name} computes other hidden states over shared prefixes (by {error:.1e})"
    return None


def _in_order(items: Items) -> Tensor:
    """Return the items' sources, sorted by their rows and positions."""
    order = np.lexsort((items.positions.cpu().numpy(), items.sequences.cpu().numpy()))
    return items.sources[torch.from_numpy(order).to(items.sources.device)]


def _branching_rows(vocabulary: int) -> list[Row]:
    """Return rows that branch twice, one of them a prefix of another, every token trained."""
    branches = [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 6, 5, 3], [1, 2, 9, 4], [1, 2, 3, 4, 5]
    return [trained_row([id % vocabulary for id in ids]) for ids in branches]


def trained_row(ids: list[int]) -> Row:
    """Return a row with these token ids, whose every token is trained that has a predecessor."""
    return written_row(ids, [0, *[1] * (len(ids) - 1)], advantage=0.0)


def _hidden(run: Callable[..., Tensor], one: Pass) -> Tensor:
    tree = TreePass(one.blocks, int(one.depths.max())) if one.depths is not None else None
    return run(hidden_of, one, tree)


def use_compiled_layers(
    model: Any,
    run: Callable[..., Tensor],
    dtype: torch.dtype,
    device: torch.device,
    packing: Literal["tree", "rows"],
    tokens: int,
) -> str | None:
    """Compile a model's layers, in place; None, or the reason why they stay as they are.

    Norms, rotations and activations become few kernels; attention over trees stays one call. A pass
    of some thousand ``tokens``, at most as many as given, is computed before and after, and
    backward where there is something to train, which compiles the kernels. Raises StartupError
    for layers that cannot be compiled, or compute otherwise then.
    """
    name, layers = type(model).__name__, layers_of(model)
    # A recurrent layer is a loop over tokens, unless a kernel for it is installed: it would be
    # compiled for minutes, for each length.
    if reason := other_layers(model):
        return reason
    if not layers:
        return f"the layers of {name} are not known"
    passes = [one.to(device) for one in _passes_of_layers(model, packing, tokens)]
    with torch.no_grad():
        expected = [_hidden(run, one) for one in passes]
    AttentionInterface.register(NAME, torch.compiler.disable(tree_attention))  # type: ignore[no-untyped-call]
    for layer in layers:
        _compile(layer)
    trains = any(p.requires_grad for p in model.parameters())
    advice = "set train.compile=false"
    for one, before in zip(passes, expected, strict=True):
        try:
            with torch.set_grad_enabled(trains):
                after = _hidden(run, one)
                if trains:
                    torch.autograd.backward(after.float().sum())
        except Exception as error:
            # The weights are gathered now, which nothing in torch 2.11 undoes.
            raise StartupError(
                f"the layers of {name} cannot be compiled ({reason_of(error)}): {advice}"
            ) from error
        difference = _difference(after.detach(), before)
        if difference > _TOLERANCE.get(dtype, _COARSE_TOLERANCE_OF_LAYERS):
            raise StartupError(
                f"the layers of {name} compute otherwise when compiled (by {difference:.1e}): "
                f"{advice}"
            )
    model.zero_grad(set_to_none=True)
    return None


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


def _passes_of_layers(model: Any, packing: Literal["tree", "rows"], tokens: int) -> list[Pass]:
    """Return a pass over one row, and, as rows are computed by themselves, one over two."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    length = min(_LAYER_TOKENS, tokens, context or 2)
    ids = [k % model.get_input_embeddings().weight.shape[0] for k in range(length)]
    if packing == "tree":
        return tree_passes([trained_row(ids)], length)
    half = trained_row(ids[: max(length // 2, 2)])
    return [*padded_passes([trained_row(ids)], length), *padded_passes([half, half], length)]
