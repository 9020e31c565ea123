"""Where weights lie in memory: sums may be taken in another order where it is elsewhere.

A file that is mapped lays them anywhere. Two processes give the same logits, bit for bit, only if
both have them where PyTorch would place them, however they came there.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

_BYTES = 64
"""PyTorch's own, of memory on the CPU."""


def aligned(tensor: Tensor) -> Tensor:
    """It, or a copy where PyTorch would place it."""
    return tensor if tensor.data_ptr() % _BYTES == 0 else tensor.clone()


def align(model: Any) -> None:
    """All of its parameters; they stay the objects that they are, so tied ones stay tied."""
    for parameter in model.parameters():
        parameter.data = aligned(parameter.data)
