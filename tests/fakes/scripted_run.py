"""One generation of the scripted engine, and the ways in which it can fail."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Literal

FaultKind = Literal[
    "die", "status", "error_event", "nan", "null", "disagree", "garbage", "spans", "no_end"
]


@dataclass(slots=True)
class Fault:
    kind: FaultKind
    after: int = 0
    """Tokens that come out before it."""
    status: int = 500


@dataclass(slots=True, eq=False)
class Running:
    rid: str
    prompt: list[int]
    params: dict[str, Any]
    script: list[int] | None
    fault: Fault | None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    finish: dict[str, Any] | None = None
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
