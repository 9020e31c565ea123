"""A model's weights in buckets: whole tensors under a checkpoint's names, never all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.lora import without_adapter_names

Bucket = list[tuple[str, Tensor]]


def stored_tensors(model: Any) -> dict[str, Tensor]:
    """Return a checkpoint's tensors by the model's names: tied weights once, under their source's.

    They are the parameters and persistent buffers themselves, no copies; shards if it is sharded.
    Those of an adapter are left out, and the others have the names that they have without it.
    """
    state = without_adapter_names(model.state_dict(keep_vars=True))
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    dropped = set(model._keys_to_ignore_on_save or ())
    out: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in state.items():
        source = tied.get(name)
        copied = source is not None and state.get(source) is tensor
        if name in dropped or copied or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        out[name] = tensor
    return out


def in_buckets(
    model: Any, nbytes: int, dtype: torch.dtype | None, gather: Callable[[list[str]], list[Tensor]]
) -> Iterator[Bucket]:
    """Yield all stored tensors, roughly in the model's order, in buckets of at most ``nbytes``.

    A bucket has one tensor at least. ``gather`` returns whole tensors for the model's names.
    Floating-point tensors come in ``dtype``, None: as they are. Names and layout are those of the
    model's published checkpoint, which may split or fuse the model's tensors: those that belong
    together come in one bucket.
    """
    if nbytes < 1:
        raise ValueError(f"a bucket must have room for a byte, not {nbytes}")
    stored = stored_tensors(model)
    names: list[str] = []
    room = nbytes
    for fused in _fused(model, stored):
        size = sum(stored[n].numel() * published_dtype(stored[n], dtype).itemsize for n in fused)
        if names and size > room:
            yield _bucket(model, names, gather(names), dtype)
            names, room = [], nbytes
        names += fused
        room -= size
    if names:
        yield _bucket(model, names, gather(names), dtype)


def _fused(model: Any, names: Iterable[str]) -> list[list[str]]:
    """Return the names, grouped by the checkpoint's tensors, in the order of each group's first.

    The steps are those of transformers' ``revert_weight_conversion``.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, apply_converters

    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    reverse = [conversion.reverse_transform() for conversion in conversions[::-1]]
    converters = [entry for entry in reverse if isinstance(entry, WeightConverter)]
    found: dict[tuple[str, bool], list[str]] = {}
    for name in names:
        stored, pattern = apply_converters(name, converters)
        key = (stored, True) if pattern is not None else (name, False)
        found.setdefault(key, []).append(name)
    return list(found.values())


def _bucket(
    model: Any, names: list[str], tensors: list[Tensor], dtype: torch.dtype | None
) -> Bucket:
    from transformers.core_model_loading import revert_weight_conversion

    cast = {n: t.to(published_dtype(t, dtype)) for n, t in zip(names, tensors, strict=True)}
    return [(name, t.contiguous()) for name, t in revert_weight_conversion(model, cast).items()]


def published_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the type that a stored tensor has in a bucket of ``dtype``."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
