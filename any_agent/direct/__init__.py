"""The OpenAI client whose calls go to an engine in this process, recorded like the service's."""

from any_agent.direct.client import EngineOpenAI

__all__ = ["EngineOpenAI"]
