"""For the authors of agents: a session around their code."""

from __future__ import annotations

from any_agent.sdk.service import Service, find_service
from any_agent.sdk.session import AgentSession, AsyncSession, Session

__all__ = ["AgentSession", "AsyncSession", "Service", "Session", "find_service"]
