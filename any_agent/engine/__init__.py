"""Inference engines: the interface, and the clients that implement it."""

from any_agent.engine.base import (
    Capabilities,
    InferenceEngine,
    RolloutEngine,
    ScriptInferenceEngine,
    agenerate,
)
from any_agent.engine.pool import EnginePool
from any_agent.engine.sglang.client import SGLangEngine

__all__ = [
    "Capabilities",
    "EnginePool",
    "InferenceEngine",
    "RolloutEngine",
    "SGLangEngine",
    "ScriptInferenceEngine",
    "agenerate",
]
