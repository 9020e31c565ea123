"""Where an agent's calls go, and how it is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

AgentMode: TypeAlias = Literal["auto", "inline", "subproc"]


@dataclass(frozen=True, slots=True)
class AgentService:
    """What every episode of an agent's workflow shares."""

    url: str
    """The service's public URL, such as `http://127.0.0.1:8000`, with `/v1` or without."""
    admin_key: str | Callable[[], str] | None = field(default=None, repr=False)
    """An admin's or a trainer's, or what gives it for each episode; None where the service has no
    keys."""
    mode: AgentMode = "auto"
    """In this process' event loop, or each run in a process of a pool, or as the agent needs it."""
    export_style: Literal["individual", "concat"] = "individual"
    """Each model call a row to train on, or one for each conversation."""
    discount: float = 1.0
    """How much of a later turn's reward an earlier turn gets, per turn."""
    max_workers: int = 4
    """Processes of the mode `subproc`."""
    timeout: float = 600.0
    """Seconds that one run of an agent may take."""
    patience: float = 300.0
    """Seconds that a service which is full, away or restarting is waited for, at each request."""
