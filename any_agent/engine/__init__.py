"""Inference engines: the interface, the kinds by name, and several engines as one."""

from any_agent.engine.base import (
    HALF_LOADED,
    Capabilities,
    InferenceEngine,
    RemoteEngine,
    RolloutEngine,
    ScriptInferenceEngine,
    agenerate,
)
from any_agent.engine.kinds import load_engine_in_process, open_engine, register_engine
from any_agent.engine.pool import EnginePool
from any_agent.engine.sglang.client import SGLangEngine

__all__ = [
    "HALF_LOADED",
    "Capabilities",
    "EnginePool",
    "InferenceEngine",
    "RemoteEngine",
    "RolloutEngine",
    "SGLangEngine",
    "ScriptInferenceEngine",
    "agenerate",
    "load_engine_in_process",
    "open_engine",
    "register_engine",
]
