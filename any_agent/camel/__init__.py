"""CAMEL-AI's agents on the direct client."""

from any_agent.camel.openai_model import AnyAgentOpenAICompatibleModel

__all__ = ["AnyAgentOpenAICompatibleModel"]
