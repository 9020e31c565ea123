"""What `any_agent` promises to its users. A change here is a change of the public interface."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import any_agent
from tests.support.errors import fails_with

PUBLIC = [
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
    "RunFinished",
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

ALIASES = {"LLMRequest": "ModelRequest", "LocalModel": "RemoteSGLangEngine"}


def test_the_public_names_are_those_listed_and_sorted() -> None:
    assert any_agent.__all__ == PUBLIC
    assert sorted(PUBLIC) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_each_name_is_there(name: str) -> None:
    value = getattr(any_agent, name)
    if name == "__version__":
        return
    assert value.__doc__
    if not inspect.ismodule(value):
        assert value.__name__ == ALIASES.get(name, name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with fails_with(AttributeError, "NoSuchName"):
        _ = any_agent.NoSuchName


@pytest.mark.service
def test_a_star_import_has_the_public_names() -> None:
    code = "from any_agent import *; print(RLClient, load_config)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize("name", any_agent._ABSENT)
def test_areals_names_without_a_counterpart_say_what_to_do(name: str) -> None:
    with fails_with(ImportError, f"any_agent has no {name}"):
        exec(f"from any_agent import {name}")
