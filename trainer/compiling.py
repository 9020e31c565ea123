"""Functions that torch.compile turns into few kernels, and what it says where it fails."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

_MOST_FORMS = 64
Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function, **options: Any) -> Function:
    """Return a function that is compiled when it is called, once for each form of its arguments.

    ``options`` are torch.compile's.
    """
    made = torch.compile(function, **options)

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        # Of the calling thread. Forms are: with and without gradients, and of which tensors, with
        # and without ancestors, for each kind of layer. Torch allows 8, and runs others uncompiled.
        with torch._dynamo.config.patch(recompile_limit=_MOST_FORMS):
            return made(*arguments, **named)

    return call  # type: ignore[return-value]


def reason_of(error: Exception) -> str:
    """Return a compiler's error on one line, without its advice."""
    return " ".join(str(error).partition("\n\n")[0].split())
