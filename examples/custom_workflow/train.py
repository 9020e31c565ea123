"""Train with the workflow:

python examples/custom_workflow/train.py --config examples/custom_workflow/config.yaml
"""

from __future__ import annotations

import random
import sys

from any_agent import GRPOConfig, load_expr_config, load_hf_tokenizer
from trainer import GRPOTrainer


class BudgetConfig(GRPOConfig):
    """The run's settings and two of our own."""

    largest: int = 99_999
    """The largest number that is added."""
    budget: int = 128
    """The most tokens of thoughts."""


def tasks(count: int, largest: int, seed: int) -> list[dict[str, str]]:
    draw = random.Random(seed)
    pairs = [(draw.randint(0, largest), draw.randint(0, largest)) for _ in range(count)]
    return [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in pairs]


def main() -> None:
    config, _ = load_expr_config(sys.argv[1:], BudgetConfig)
    dataset = tasks(1000, config.largest, config.train.seed)
    with GRPOTrainer(config, train_dataset=dataset) as trainer:
        trainer.train(
            workflow="workflow.BudgetedThinking",
            workflow_kwargs={
                "tokenizer": load_hf_tokenizer(config.tokenizer_path),
                "gconfig": config.gconfig,
                "budget": config.budget,
            },
        )


if __name__ == "__main__":
    main()
