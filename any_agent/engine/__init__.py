"""Inference engines: the interface, the kinds by name, and several engines as one."""

from any_agent.engine.base import HALF_LOADED as HALF_LOADED
from any_agent.engine.base import Capabilities as Capabilities
from any_agent.engine.base import InferenceEngine as InferenceEngine
from any_agent.engine.base import RemoteEngine as RemoteEngine
from any_agent.engine.base import RolloutEngine as RolloutEngine
from any_agent.engine.base import ScriptInferenceEngine as ScriptInferenceEngine
from any_agent.engine.base import agenerate as agenerate
from any_agent.engine.kinds import load_engine_in_process as load_engine_in_process
from any_agent.engine.kinds import open_engine as open_engine
from any_agent.engine.kinds import register_engine as register_engine
from any_agent.engine.kinds import split_adapter as split_adapter
from any_agent.engine.pool import EnginePool as EnginePool
from any_agent.engine.sglang.client import SGLangEngine as SGLangEngine
