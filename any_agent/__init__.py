"""any-agent: makes any OpenAI-compatible agent trainable by reinforcement learning."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from any_agent import stats_tracker
    from any_agent.chat import load_hf_tokenizer
    from any_agent.client.rl_client import RLClient
    from any_agent.config import Config, load_config
    from any_agent.config.script import GRPOConfig, load_expr_config
    from any_agent.data import get_custom_dataset
    from any_agent.direct import EngineOpenAI
    from any_agent.engine import InferenceEngine
    from any_agent.errors import AnyAgentError
    from any_agent.inference import LocalModel, RemoteSGLangEngine, load_engine
    from any_agent.record import CompletionWithTokenLogpReward, InteractionWithTokenLogpReward
    from any_agent.rewards.async_wrapper import AsyncRewardWrapper, gsm8k_reward_fn
    from any_agent.sdk import AgentRunner, AgentSession
    from any_agent.types import (
        GenerationHyperparameters,
        Interaction,
        LLMRequest,
        ModelRequest,
        ModelResponse,
        Trajectory,
    )
    from any_agent.workflow import (
        GroupedRolloutWorkflow,
        MultiTurnWorkflow,
        OpenAIProxyClient,
        OpenAIProxyWorkflow,
        ProxyWorkflow,
        RLVRWorkflow,
        RolloutWorkflow,
        concat_padded_tensors,
    )
    from any_agent.workflow import context as workflow_context

__version__ = "0.1.0"

_HOMES = {
    "AgentRunner": "any_agent.sdk",
    "AgentSession": "any_agent.sdk",
    "AnyAgentError": "any_agent.errors",
    "AsyncRewardWrapper": "any_agent.rewards.async_wrapper",
    "CompletionWithTokenLogpReward": "any_agent.record",
    "Config": "any_agent.config",
    "EngineOpenAI": "any_agent.direct",
    "GRPOConfig": "any_agent.config.script",
    "GenerationHyperparameters": "any_agent.types",
    "GroupedRolloutWorkflow": "any_agent.workflow",
    "InferenceEngine": "any_agent.engine",
    "Interaction": "any_agent.types",
    "InteractionWithTokenLogpReward": "any_agent.record",
    "LLMRequest": "any_agent.types",
    "LocalModel": "any_agent.inference",
    "ModelRequest": "any_agent.types",
    "ModelResponse": "any_agent.types",
    "MultiTurnWorkflow": "any_agent.workflow",
    "OpenAIProxyClient": "any_agent.workflow",
    "OpenAIProxyWorkflow": "any_agent.workflow",
    "ProxyWorkflow": "any_agent.workflow",
    "RLClient": "any_agent.client",
    "RLVRWorkflow": "any_agent.workflow",
    "RemoteSGLangEngine": "any_agent.inference",
    "RolloutWorkflow": "any_agent.workflow",
    "Trajectory": "any_agent.types",
    "concat_padded_tensors": "any_agent.workflow",
    "get_custom_dataset": "any_agent.data",
    "gsm8k_reward_fn": "any_agent.rewards.async_wrapper",
    "load_config": "any_agent.config",
    "load_engine": "any_agent.inference",
    "load_expr_config": "any_agent.config.script",
    "load_hf_tokenizer": "any_agent.chat",
}
_MODULES = {
    "stats_tracker": "any_agent.stats_tracker",
    "workflow_context": "any_agent.workflow.context",
}

_ABSENT = {
    "ArealOpenAI": "use any_agent.EngineOpenAI",
    "GRPOTrainer": "import it from trainer",
    "InferenceEngineConfig": "use any_agent.GRPOConfig; its section rollout",
    "PPOTrainer": "import it from trainer",
    "RemoteInfEngine": "use any_agent.RemoteSGLangEngine",
    "RolloutController": "use any_agent.RemoteSGLangEngine",
    "StatsLogger": "each step is a line of the run's metrics.jsonl, and GET /metrics serves it",
    "TensorDict": "a dict of torch tensors: dict[str, torch.Tensor]",
    "get_gsm8k_rl_dataset": "use any_agent.get_custom_dataset",
    "get_gsm8k_sft_dataset": "nothing is trained on texts that the policy has not sampled",
    "ppo_update": "a step is GRPOTrainer.train's own",
    "train_lm": "nothing is trained on texts that the policy has not sampled",
}
"""AReaL's names that lack a counterpart of the same name here, and what to do."""

__all__ = [
    "AgentRunner",
    "AgentSession",
    "AnyAgentError",
    "AsyncRewardWrapper",
    "CompletionWithTokenLogpReward",
    "Config",
    "EngineOpenAI",
    "GRPOConfig",
    "GenerationHyperparameters",
    "GroupedRolloutWorkflow",
    "InferenceEngine",
    "Interaction",
    "InteractionWithTokenLogpReward",
    "LLMRequest",
    "LocalModel",
    "ModelRequest",
    "ModelResponse",
    "MultiTurnWorkflow",
    "OpenAIProxyClient",
    "OpenAIProxyWorkflow",
    "ProxyWorkflow",
    "RLClient",
    "RLVRWorkflow",
    "RemoteSGLangEngine",
    "RolloutWorkflow",
    "Trajectory",
    "__version__",
    "concat_padded_tensors",
    "get_custom_dataset",
    "gsm8k_reward_fn",
    "load_config",
    "load_engine",
    "load_expr_config",
    "load_hf_tokenizer",
    "stats_tracker",
    "workflow_context",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `import any_agent` itself stays light."""
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name in _ABSENT:
        # Not an AttributeError: `from any_agent import ...` would drop its message.
        raise ImportError(f"any_agent has no {name}: {_ABSENT[name]}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'any_agent' has no attribute {name!r}")
    return getattr(import_module(home), name)
