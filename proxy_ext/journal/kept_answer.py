"""What a change commits together with its effect, so that its answer is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from pydantic import BaseModel

from proxy_ext.journal import Statement

KeepAnswer: TypeAlias = Callable[[BaseModel], tuple[Statement, ...]]
"""From an answer to what keeps it. Whatever changes something takes one, makes its answer before
the commit, and commits these statements with the rest."""


def no_receipt(_: BaseModel) -> tuple[Statement, ...]:
    """The KeepAnswer callback of a request without a key."""
    return ()
