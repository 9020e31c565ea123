"""What `any_agent` promises to its users. A change here is a change of the public interface."""

from __future__ import annotations

import inspect

import any_agent
from tests.support.errors import fails_with

PUBLIC = """
AgentRunner AgentSession AnyAgentError AsyncRewardWrapper CompletionWithTokenLogpReward Config
EngineOpenAI GRPOConfig GenerationHyperparameters GroupedRolloutWorkflow InferenceEngine
Interaction InteractionWithTokenLogpReward LLMRequest LocalModel ModelRequest ModelResponse
MultiTurnWorkflow OpenAIProxyClient OpenAIProxyWorkflow ProxyWorkflow RLClient RLVRWorkflow
RemoteSGLangEngine RolloutWorkflow RunFinished Trajectory __version__ concat_padded_tensors
get_custom_dataset gsm8k_reward_fn load_config load_engine load_expr_config load_hf_tokenizer
stats_tracker workflow_context
"""
ALIASES = {"LLMRequest": "ModelRequest", "LocalModel": "RemoteSGLangEngine"}
ABSENT = """
ArealOpenAI GRPOTrainer InferenceEngineConfig PPOTrainer RemoteInfEngine RolloutController
StatsLogger TensorDict get_gsm8k_rl_dataset get_gsm8k_sft_dataset ppo_update train_lm
"""
"""Names of AReaL's without a counterpart."""


def test_each_public_name_is_there_and_explained() -> None:
    assert any_agent.__all__ == sorted(PUBLIC.split())
    values = {name: getattr(any_agent, name) for name in PUBLIC.split() if name != "__version__"}
    assert [name for name, value in values.items() if not value.__doc__] == []
    named = {n: v.__name__ for n, v in values.items() if not inspect.ismodule(v)}
    assert {n: own for n, own in named.items() if own != n} == ALIASES


def test_names_that_are_not_there_say_what_to_do() -> None:
    with fails_with(AttributeError, "NoSuchName"):
        _ = any_agent.NoSuchName
    for name in ABSENT.split():
        with fails_with(ImportError, f"any_agent has no {name}"):
            exec(f"from any_agent import {name}")
