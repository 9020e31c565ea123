"""Variants of one model: each has a version, a gate and requests of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

PauseMode: TypeAlias = Literal["abort", "in_place"]


@dataclass(eq=False, slots=True)
class Variant:
    """The model, or the model with one live adapter. The loop's thread alone changes it."""

    version: str
    """The name of its weights, which its next token is sampled with."""
    adapter: str | None = None
    """The name of its live adapter; None: the model without one."""
    paused: PauseMode | None = None
    update: tuple[Callable[[], int], Future[int]] | None = None
    """New weights that wait for its running requests, and the future of their number."""
    waiting: deque[Any] = field(default_factory=deque)
    """Its requests that have not joined the batch, in their order."""

    @property
    def admits(self) -> bool:
        """True if a waiting request may join the running ones."""
        updates = self.update is not None and not self.update[1].cancelled()
        return bool(self.waiting) and self.paused is None and not updates
