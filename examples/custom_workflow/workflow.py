"""A workflow that no agent could be: it writes a part of the model's answer itself.

The model thinks for a number of tokens. If it has not begun its answer by then, the workflow writes
the first words, and the model continues from there. The written words are not trained on.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from any_agent import (
    GenerationHyperparameters,
    ModelRequest,
    ModelResponse,
    RolloutWorkflow,
    stats_tracker,
    workflow_context,
)
from any_agent.engine import RolloutEngine

SYSTEM = "Think first. End with: So the answer is ..."
CONCLUDES = "So the answer is "


class Row:
    """The tokens of an episode, with each token's data for training."""

    def __init__(self, prompt: list[int]) -> None:
        self.ids: list[int] = []
        self.trained: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.written(prompt)

    def written(self, ids: list[int]) -> None:
        """Append tokens that the model has not sampled."""
        self.ids += ids
        self.trained += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)

    def sampled(self, response: ModelResponse) -> None:
        self.ids += response.output_tokens
        self.trained += [1] * response.output_len
        self.logprobs += response.output_logprobs
        self.versions += response.output_versions

    def tensors(self, reward: float) -> dict[str, torch.Tensor]:
        return {
            "input_ids": torch.tensor([self.ids], dtype=torch.int32),
            "attention_mask": torch.ones(1, len(self.ids), dtype=torch.bool),
            "loss_mask": torch.tensor([self.trained], dtype=torch.int32),
            "logprobs": torch.tensor([self.logprobs], dtype=torch.float32),
            "versions": torch.tensor([self.versions], dtype=torch.int32),
            "rewards": torch.tensor([reward], dtype=torch.float32),
        }


class BudgetedThinking(RolloutWorkflow):
    """``budget`` tokens of thoughts, then at most ``answer`` tokens of an answer."""

    def __init__(
        self, tokenizer: Any, gconfig: GenerationHyperparameters, budget: int, answer: int = 16
    ) -> None:
        self.tokenizer = tokenizer
        self.gconfig = gconfig.new(stop_token_ids=[tokenizer.eos_token_id])
        self.budget = budget
        self.answer = answer
        self.concludes = tokenizer.encode(CONCLUDES, add_special_tokens=False)

    async def arun_episode(
        self, engine: RolloutEngine, data: dict[str, Any]
    ) -> dict[str, torch.Tensor] | None:
        """Return one row: the prompt, the thoughts, the written words, the answer."""
        prompt = self._prompt(data["question"])
        row = Row(prompt)
        thoughts = await self._sample(engine, row, self.budget)
        cut = thoughts.stop_reason == "length"
        if cut:
            if CONCLUDES not in self.tokenizer.decode(thoughts.output_tokens):
                row.written(self.concludes)
            await self._sample(engine, row, self.answer)
        said = self.tokenizer.decode(row.ids[len(prompt) :], skip_special_tokens=True)
        reward = float(re.findall(r"-?\d+", said)[-1:] == [data["answer"]])
        stats_tracker.get(workflow_context.stat_scope()).scalar(reward=reward, cut=float(cut))
        return row.tensors(reward)

    async def _sample(self, engine: RolloutEngine, row: Row, tokens: int) -> ModelResponse:
        gconfig = self.gconfig.new(max_new_tokens=tokens)
        response = await engine.agenerate(ModelRequest(input_ids=list(row.ids), gconfig=gconfig))
        row.sampled(response)
        return response

    def _prompt(self, question: str) -> list[int]:
        talk = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        ids = self.tokenizer.apply_chat_template(
            talk, add_generation_prompt=True, enable_thinking=False, return_dict=False
        )
        return list(ids)
