"""Workflows that make the calls of AReaL's references."""

from __future__ import annotations

from typing import Any

import torch

from any_agent import EngineOpenAI, ModelRequest, RolloutWorkflow, stats_tracker, workflow_context


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
