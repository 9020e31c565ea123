"""For the authors of agents: a session around their code, and runs of it on a dataset."""

from __future__ import annotations

from any_agent.sdk.find_service import ServiceAddress, find_service
from any_agent.sdk.progress import RunProgress
from any_agent.sdk.results import RunResult, RunResults
from any_agent.sdk.runner import AgentRunner
from any_agent.sdk.session import AgentSession, AsyncSession, Session

__all__ = [
    "AgentRunner",
    "AgentSession",
    "AsyncSession",
    "RunProgress",
    "RunResult",
    "RunResults",
    "ServiceAddress",
    "Session",
    "find_service",
]
