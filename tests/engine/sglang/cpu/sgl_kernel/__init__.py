"""Stands for SGLang's compiled kernels, which exist for GPUs only; none is called on a CPU."""

from __future__ import annotations

from typing import Any

__version__ = "0.4.10"


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU")

    return missing
