"""The SDK for authors of agents: a session around their code, and runs of it on a dataset."""

from any_agent.sdk.find_service import ServiceAddress as ServiceAddress
from any_agent.sdk.find_service import find_service as find_service
from any_agent.sdk.open_session import AgentSession as AgentSession
from any_agent.sdk.results import RunProgress as RunProgress
from any_agent.sdk.results import RunResult as RunResult
from any_agent.sdk.results import RunResults as RunResults
from any_agent.sdk.runner import AgentRunner as AgentRunner
from any_agent.sdk.session import AsyncSession as AsyncSession
from any_agent.sdk.session import Session as Session
