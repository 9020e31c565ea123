"""Workflows as AReaL's references write them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from any_agent import (
    EngineOpenAI,
    GenerationHyperparameters,
    ModelRequest,
    RolloutWorkflow,
    load_hf_tokenizer,
    stats_tracker,
    workflow_context,
)
from any_agent.config import RolloutConfig
from any_agent.engine import EnginePool
from any_agent.rollout import WorkflowExecutor
from tests.support.areal.calculator import calculator

TASK = {
    "messages": [{"role": "user", "content": "What is 2 and 3?"}],
    "prompt": "What is 2 and 3?",
    "answer": "5",
}


class ByClient(RolloutWorkflow):
    """One call of the direct client, its reward, its export."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    async def arun_episode(self, engine: Any, data: Any) -> Any:
        client = EngineOpenAI(engine=engine, tokenizer=self.tokenizer)
        answer = await client.chat.completions.create(model="any", messages=data["messages"])
        client.set_last_reward(float(data["answer"] in (answer.choices[0].message.content or "")))
        client.apply_reward_discount(turn_discount=0.9)
        return client.export_interactions(style="individual")


class ByRequest(RolloutWorkflow):
    """One request of token ids; an item without a question is rejected."""

    def __init__(self, tokenizer: Any, gconfig: Any, **kwargs: Any) -> None:
        self.tokenizer, self.gconfig = tokenizer, gconfig

    async def arun_episode(self, engine: Any, data: Any) -> Any:
        if "?" not in data["prompt"]:
            return None
        ids = self.tokenizer.encode(data["prompt"])
        request = ModelRequest(
            rid="one", input_ids=ids, gconfig=self.gconfig, tokenizer=self.tokenizer
        )
        response = await engine.agenerate(request)
        answer = self.tokenizer.decode(response.output_tokens, skip_special_tokens=True)
        prompt, output = response.input_len, response.output_len
        return {
            "input_ids": torch.tensor([response.input_tokens + response.output_tokens]),
            "attention_mask": torch.ones(1, prompt + output, dtype=torch.bool),
            "loss_mask": torch.tensor([[0] * prompt + [1] * output]),
            "logprobs": torch.tensor([[0.0] * prompt + response.output_logprobs]),
            "versions": torch.tensor([[-1] * prompt + response.output_versions]),
            "rewards": torch.tensor([float(answer == data["answer"])]),
        }


class InContext(RolloutWorkflow):
    """The context of an episode, and a figure under its scope."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    async def arun_episode(self, engine: Any, data: Any) -> None:
        context, scope = workflow_context.get(), workflow_context.stat_scope()
        self.seen.append((context.task_id, context.is_eval, scope))
        session = await workflow_context.get_aiohttp_session()
        assert session is await workflow_context.get_aiohttp_session()
        stats_tracker.get(scope).scalar(reward=data["reward"])


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Any:
    return load_hf_tokenizer(str(tiny_model_dir))


@pytest.fixture(scope="module")
def executor(tiny_model_dir: Path, tokenizer: Any) -> Iterator[WorkflowExecutor]:
    """An engine whose model is right and wrong in turn."""
    config = RolloutConfig()  # type: ignore[call-arg]
    with (
        calculator(tiny_model_dir) as engine,
        WorkflowExecutor(EnginePool([engine.url], decode=tokenizer.decode), config) as executor,
    ):
        yield executor


def run(executor: WorkflowExecutor, name: str, data: Any = TASK, **more: Any) -> Any:
    executor.submit(data, f"{__name__}.{name}", **more)
    (result,) = executor.wait(1, timeout=60)
    return result


def test_the_direct_approach(executor: WorkflowExecutor, tokenizer: Any) -> None:
    kwargs = {"tokenizer": tokenizer}
    got = run(executor, "ByClient", workflow_kwargs=kwargs, group_size=2)
    assert sorted(got["rewards"].tolist()) == [0.0, 1.0]
    assert got["input_ids"].shape == got["logprobs"].shape == got["versions"].shape
    assert got["loss_mask"].sum(1).tolist() == [2, 2], "a digit and the end of the turn"


def test_a_workflow_of_ones_own(executor: WorkflowExecutor, tokenizer: Any) -> None:
    kwargs = {"tokenizer": tokenizer, "gconfig": GenerationHyperparameters(max_new_tokens=8)}
    got = run(executor, "ByRequest", workflow_kwargs=kwargs, group_size=4)
    assert sorted(got["rewards"].tolist()) == [0.0, 0.0, 1.0, 1.0]
    ids = got["input_ids"][0][got["loss_mask"][0].bool()].tolist()
    assert tokenizer.decode(ids, skip_special_tokens=True) in ("5", "6")
    rejected = run(executor, "ByRequest", TASK | {"prompt": "2 and 3"}, workflow_kwargs=kwargs)
    assert rejected is None


@pytest.mark.parametrize(("is_eval", "scope"), [(False, "rollout"), (True, "eval-rollout")])
def test_the_context_and_its_figures(executor: WorkflowExecutor, is_eval: bool, scope: str) -> None:
    stats_tracker.export_all()
    workflow = InContext()
    number = executor.submit({"reward": 0.25}, workflow, is_eval=is_eval)
    executor.wait_for_task(number, timeout=60)
    assert workflow.seen == [(number, is_eval, scope)]
    assert stats_tracker.get(scope).export()[f"{scope}/reward"] == 0.25
