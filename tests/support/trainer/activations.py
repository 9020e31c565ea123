"""Count the memory of a forward pass."""

from __future__ import annotations

from typing import Any

import torch


def kept(model: Any, tokens: int) -> int:
    """Bytes that autograd keeps of a forward pass, each memory once, weights aside."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, int] = {}
    held = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held.append(tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.base_model(input_ids=torch.ones(1, tokens, dtype=torch.long), use_cache=False)
    return sum(found.values())
