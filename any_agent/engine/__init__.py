"""Inference engines: the interface, and the clients that implement it."""

from any_agent.engine.base import InferenceEngine, agenerate
from any_agent.engine.sglang import SGLangEngine

__all__ = ["InferenceEngine", "SGLangEngine", "agenerate"]
