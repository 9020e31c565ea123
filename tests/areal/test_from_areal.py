"""Every documented name has a row in from-areal.md, and every row has tests that exist."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.documents.text import CLASSES, MODULES

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools" / "docs"))
SECTIONS: dict[str, list[Any]] = import_module("from_areal").sections()
ROWS = [row for rows in SECTIONS.values() for row in rows]


DOCUMENTED: dict[str, str] = {
    "reference/agent_workflow.md": """
        MyAgent MySyncAgent MyWorkflow
        ArealOpenAI InteractionWithTokenLogpReward OpenAIProxyClient OpenAIProxyWorkflow
        RolloutWorkflow GroupedRolloutWorkflow PPOTrainer InteractionCache ModelResponse
        RolloutController RemoteInfEngine
        run arun_episode base_url api_key http_client OPENAI_BASE_URL OPENAI_API_KEY
        chat.completions.create responses.create set_reward set_last_reward apply_reward_discount
        turn_discount export_interactions session_api_key discount style individual concat
        model_response reward parent messages output_message_list completion to_tensor_dict
        input_ids loss_mask logprobs versions attention_mask rewards
        _resolve_workflow workflow_kwargs group_size proxy_addr agenerate
        rollout.agent.mode inline subproc rollout.agent.subproc_max_workers
        /grant_capacity /rl/start_session /v1/chat/completions /v1/responses /v1/messages
        /rl/set_reward /rl/end_session /export_trajectories
    """,
    "tutorial/agentic_rl.md": """
        MathAgent CamelMathAgent CamelRLVRWorkflow math_reward_fn run_agent
        PPOTrainer train_dataset train workflow load_expr_config GRPOConfig tokenizer_path gconfig
        get_custom_dataset split dataset_config tokenizer load_hf_tokenizer
        ArealOpenAI AReaLOpenAICompatibleModel openai_client model_type AsyncRewardWrapper
        RolloutWorkflow GenerationHyperparameters set_last_reward apply_reward_discount
        export_interactions arun_episode scheduler.type InteractionCache
        examples/agent_workflow examples/camel claude_math_agent.py langchain/math_agent.py
        examples/openclaw
    """,
    "reference/rollout_workflow.md": """
        RolloutWorkflow arun_episode InferenceEngine InteractionWithTokenLogpReward MyWorkflow
        input_ids attention_mask loss_mask logprobs rewards versions
        workflow_context workflow_context.get is_eval task_id stat_scope
        rollout.dump_to_file rollout.fileroot rollout.tokenizer_path experiment_name trial_name
        sample_idx seqlen prompt_len head_version tail_version reward prompt completion
        submit data workflow workflow_kwargs group_size rollout.group_size
        GroupedRolloutWorkflow concat_padded_tensors
        ModelRequest rid input_ids gconfig tokenizer agenerate train
    """,
    "best_practices/workflow.md": """
        MyWorkflow MyAgentWorkflow arun_episode run agenerate generate get_aiohttp_session
        AsyncRewardWrapper reward_fn workflow_context http_client base_url api_key RolloutWorkflow
    """,
    "customization/agent.md": """
        MyAgent MySyncAgent run train data extra_kwargs base_url api_key http_client
        rollout.agent.mode rollout.agent.turn_discount rollout.agent.export_style
        rollout.agent.subproc_max_workers OPENAI_BASE_URL OPENAI_API_KEY
    """,
    "tutorial/online_proxy.md": """
        rollout.agent.mode online rollout.agent.admin_api_key
        rollout.agent.session_timeout_seconds rollout.agent.turn_discount
        rollout.agent.export_style train_dataset.batch_size
        rollout.backend actor.backend actor.path scheduler.type experiment_name trial_name
        /rl/start_session /health /chat/completions /responses /v1/messages /rl/set_reward
        /rl/end_session task_id api_key session_id reward interaction_id 401 409 429 502
    """,
    "customization/dataset.md": """
        RLVRWorkflow reward_fn prompt completions prompt_ids completion_ids input_tokens
        output_tokens enable_thinking prepare_batch should_accept_fn dynamic_filter_fn
        gconfig.n_samples dynamic_bs train_lm get_gsm8k_rl_dataset get_gsm8k_sft_dataset
    """,
    "reference/metrics_tracking.md": """
        stats_tracker scalar get denominator stat scope record_timing export_all reduce_group
        AVG_MIN_MAX AVG SUM MIN MAX SCALAR export_stats ppo_update StatsLogger commit
        evaluator.eval_before_train
        stats_logger.wandb stats_logger.swanlab stats_logger.tensorboard
    """,
}
"""The names in code and tables of AReaL 1.0.4's documents: each stands in a table of ours."""


@pytest.mark.parametrize("document", DOCUMENTED)
def test_every_documented_name_has_a_row(document: str) -> None:
    mapped = {name for row in ROWS for name in re.findall(r"`([^`]+)`", row.areal)}
    assert not [name for name in DOCUMENTED[document].split() if name not in mapped]


def test_every_row_has_a_test() -> None:
    assert len(ROWS) > 100
    assert not [row.areal for row in ROWS if not row.tests]
    assert not [row for row in ROWS if not row.areal or not row.here]


def test_every_named_test_exists() -> None:
    named = {test for row in ROWS for test in row.tests}
    assert not [test for test in sorted(named) if not _exists(*test.split("::"))]


def test_the_modules_of_the_documents_have_a_row_each() -> None:
    rows = {row.areal.strip("`"): row.here for row in SECTIONS["Import names"]}
    assert {name: f"`{here}`" for name, here in {**MODULES, **CLASSES}.items()} == rows
    for name in MODULES.values():
        if not name.startswith("any_agent.camel"):
            import_module(name)


def test_every_name_that_is_given_can_be_imported() -> None:
    given = re.findall(r"`any_agent\.(\w+)`", " ".join(row.here for row in ROWS))
    assert given and not [name for name in given if not hasattr(import_module("any_agent"), name)]


@cache
def _functions(file: str) -> frozenset[str]:
    path = ROOT / file
    if not path.exists():
        return frozenset()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, kinds))


def _exists(file: str, name: str) -> bool:
    return name in _functions(file)
