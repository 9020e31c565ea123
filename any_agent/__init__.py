"""any-agent: makes any OpenAI-compatible agent trainable by reinforcement learning."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from any_agent.runtime.public_names import public_name

if TYPE_CHECKING:
    from any_agent import stats_tracker as stats_tracker
    from any_agent.chat import load_hf_tokenizer as load_hf_tokenizer
    from any_agent.client.rl_client import RLClient as RLClient
    from any_agent.config import Config as Config
    from any_agent.config import load_config as load_config
    from any_agent.config.script import GRPOConfig as GRPOConfig
    from any_agent.config.script import load_expr_config as load_expr_config
    from any_agent.data import get_custom_dataset as get_custom_dataset
    from any_agent.direct import EngineOpenAI as EngineOpenAI
    from any_agent.engine import InferenceEngine as InferenceEngine
    from any_agent.errors import AnyAgentError as AnyAgentError
    from any_agent.errors import RunFinished as RunFinished
    from any_agent.inference import LocalModel as LocalModel
    from any_agent.inference import RemoteSGLangEngine as RemoteSGLangEngine
    from any_agent.inference import load_engine as load_engine
    from any_agent.record import CompletionWithTokenLogpReward as CompletionWithTokenLogpReward
    from any_agent.record import InteractionWithTokenLogpReward as InteractionWithTokenLogpReward
    from any_agent.rewards.async_wrapper import AsyncRewardWrapper as AsyncRewardWrapper
    from any_agent.rewards.async_wrapper import gsm8k_reward_fn as gsm8k_reward_fn
    from any_agent.sdk import AgentRunner as AgentRunner
    from any_agent.sdk import AgentSession as AgentSession
    from any_agent.types import GenerationHyperparameters as GenerationHyperparameters
    from any_agent.types import Interaction as Interaction
    from any_agent.types import LLMRequest as LLMRequest
    from any_agent.types import ModelRequest as ModelRequest
    from any_agent.types import ModelResponse as ModelResponse
    from any_agent.types import Trajectory as Trajectory
    from any_agent.workflow import GroupedRolloutWorkflow as GroupedRolloutWorkflow
    from any_agent.workflow import MultiTurnWorkflow as MultiTurnWorkflow
    from any_agent.workflow import OpenAIProxyClient as OpenAIProxyClient
    from any_agent.workflow import OpenAIProxyWorkflow as OpenAIProxyWorkflow
    from any_agent.workflow import ProxyWorkflow as ProxyWorkflow
    from any_agent.workflow import RLVRWorkflow as RLVRWorkflow
    from any_agent.workflow import RolloutWorkflow as RolloutWorkflow
    from any_agent.workflow import concat_padded_tensors as concat_padded_tensors
    from any_agent.workflow import context as workflow_context  # noqa: F401

__version__ = "0.1.0"

_NAMES = {
    "chat": "load_hf_tokenizer",
    "client": "RLClient",
    "config": "Config load_config",
    "config.script": "GRPOConfig load_expr_config",
    "data": "get_custom_dataset",
    "direct": "EngineOpenAI",
    "engine": "InferenceEngine",
    "errors": "AnyAgentError RunFinished",
    "inference": "LocalModel RemoteSGLangEngine load_engine",
    "record": "CompletionWithTokenLogpReward InteractionWithTokenLogpReward",
    "rewards.async_wrapper": "AsyncRewardWrapper gsm8k_reward_fn",
    "sdk": "AgentRunner AgentSession",
    "types": "GenerationHyperparameters Interaction LLMRequest ModelRequest ModelResponse "
    "Trajectory",
    "workflow": "GroupedRolloutWorkflow MultiTurnWorkflow OpenAIProxyClient OpenAIProxyWorkflow "
    "ProxyWorkflow RLVRWorkflow RolloutWorkflow concat_padded_tensors",
}
_HOMES = {name: f"any_agent.{home}" for home, names in _NAMES.items() for name in names.split()}
_MODULES = {
    "stats_tracker": "any_agent.stats_tracker",
    "workflow_context": "any_agent.workflow.context",
}
_SAMPLED_ONLY = "only tokens that the policy has sampled are trained on"
_ABSENT = {
    "ArealOpenAI": "use any_agent.EngineOpenAI",
    "GRPOTrainer": "import it from trainer",
    "InferenceEngineConfig": "use any_agent.GRPOConfig; its section rollout",
    "PPOTrainer": "import it from trainer",
    "RemoteInfEngine": "use any_agent.RemoteSGLangEngine",
    "RolloutController": "use any_agent.RemoteSGLangEngine",
    "StatsLogger": "use the setting tracking.to; metrics.jsonl has a line for each step, too",
    "TensorDict": "use a dict of torch tensors: dict[str, torch.Tensor]",
    "get_gsm8k_rl_dataset": "use any_agent.get_custom_dataset",
    "get_gsm8k_sft_dataset": _SAMPLED_ONLY,
    "ppo_update": "GRPOTrainer.train makes each step itself",
    "train_lm": _SAMPLED_ONLY,
}
"""AReaL's names without a counterpart of the same name here, each with the advice for its user."""

__all__ = sorted((*_HOMES, *_MODULES, "__version__"))


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `import any_agent` itself stays light."""
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name in _ABSENT:
        # Not an AttributeError: `from any_agent import ...` would drop its message.
        raise ImportError(f"any_agent has no {name}: {_ABSENT[name]}")
    if name not in _HOMES:
        raise AttributeError(f"module 'any_agent' has no attribute {name!r}")
    return public_name(_HOMES[name], name)
