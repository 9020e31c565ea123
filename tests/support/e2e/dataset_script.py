"""A researcher's script: ``python -m tests.support.e2e.dataset_script root=... model.path=...``.

Its workflow samples with seeds of its own, so that two runs can be compared bit for bit.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import torch
from transformers import AutoTokenizer

from any_agent import GRPOConfig, ModelRequest, RolloutWorkflow, load_expr_config
from any_agent.engine import RolloutEngine
from trainer import GRPOTrainer

GROUP = 2


class Seeded(RolloutWorkflow):
    """Counts on from a number; the reward is a sum over the tokens, so any two runs differ."""

    def __init__(self, model: str) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._runs: Counter[int] = Counter()

    async def arun_episode(
        self, engine: RolloutEngine, data: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        n = data["n"]
        seed = 1000 * n + self._runs[n] % GROUP
        self._runs[n] += 1
        prompt = self._tokenizer.encode(f"count from {n}:")
        gconfig = GRPOConfig().gconfig.new(max_new_tokens=8, seed=seed)
        answer = await engine.agenerate(ModelRequest(input_ids=prompt, gconfig=gconfig))
        before, after = len(prompt), answer.output_len
        reward = sum(k * id for k, id in enumerate(answer.output_tokens)) % 997 / 997

        def ints(values: list[int]) -> torch.Tensor:
            return torch.tensor([values], dtype=torch.int32)

        return {
            "input_ids": ints(prompt + answer.output_tokens),
            "loss_mask": ints([0] * before + [1] * after),
            "logprobs": torch.tensor([[0.0] * before + answer.output_logprobs]),
            "versions": ints([-1] * before + answer.output_versions),
            "attention_mask": torch.ones(1, before + after, dtype=torch.bool),
            "rewards": torch.tensor([reward]),
        }


def main(args: list[str]) -> None:
    config, _ = load_expr_config(args, GRPOConfig)
    items = [{"n": n} for n in range(10)]
    with GRPOTrainer(config, train_dataset=items) as trainer:
        trainer.train(
            workflow="tests.support.e2e.dataset_script.Seeded",
            workflow_kwargs={"model": config.model.path},
        )


if __name__ == "__main__":
    main(sys.argv[1:])
