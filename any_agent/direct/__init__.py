"""The OpenAI client whose calls go to an engine in this process, recorded like the service's."""

from any_agent.direct.client import EngineOpenAI
from any_agent.direct.session import Exported

__all__ = ["EngineOpenAI", "Exported"]
