"""The layers of a model, fused by torch.compile, and the check at load that they are the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AttentionInterface

from any_agent.errors import StartupError
from trainer.compiling import compiled, reason_of
from trainer.logprobs import hidden_of
from trainer.packing import Pass, padded_passes, tree_passes
from trainer.tree_attention import NAME, TreePass, tree_attention
from trainer.tree_probe import TOLERANCE, other_layers, trained_row
from trainer.world import layers_of

_TOKENS = 4096
"""The most tokens of a pass that is tried."""
_COARSE_TOLERANCE = 0.1
"""Kernels by themselves round where fused ones do not."""


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
    backward where there is something to train, which compiles the kernels.

    ``run(work, *arguments)`` returns ``work(model, *arguments)``; ``dtype`` is the type that the
    model computes in. In a world all processes must call it together. Raises StartupError for
    layers that cannot be compiled, or compute otherwise then.
    """
    name, layers = type(model).__name__, layers_of(model)
    # A recurrent layer is a loop over tokens, unless a kernel for it is installed: it would be
    # compiled for minutes, for each length.
    if reason := other_layers(model):
        return reason
    if not layers:
        return f"the layers of {name} are not known"
    passes = [one.to(device) for one in _passes(model, packing, tokens)]
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
        difference = float((after.detach() - before).norm() / before.norm())
        if not difference <= TOLERANCE.get(dtype, _COARSE_TOLERANCE):
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


def _hidden(run: Callable[..., Tensor], one: Pass) -> Tensor:
    tree = TreePass(one.blocks, int(one.depths.max())) if one.depths is not None else None
    return run(hidden_of, one, tree)


def _passes(model: Any, packing: Literal["tree", "rows"], tokens: int) -> list[Pass]:
    """Return a pass over one row, and, as rows are computed by themselves, one over two."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    length = min(_TOKENS, tokens, context or 2)
    ids = [k % model.get_input_embeddings().weight.shape[0] for k in range(length)]
    if packing == "tree":
        return tree_passes([trained_row(ids)], length)
    half = trained_row(ids[: max(length // 2, 2)])
    return [*padded_passes([trained_row(ids)], length), *padded_passes([half, half], length)]
