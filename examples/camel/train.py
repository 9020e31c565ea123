"""Train the agent: python examples/camel/train.py --config examples/camel/config.yaml"""

from __future__ import annotations

import random
import sys

from any_agent import GRPOConfig, load_expr_config
from trainer import GRPOTrainer


class SumsConfig(GRPOConfig):
    """The run's settings and one of our own."""

    largest: int = 99_999
    """The largest number that is added."""


def tasks(count: int, largest: int, seed: int) -> list[dict[str, str]]:
    draw = random.Random(seed)
    pairs = [(draw.randint(0, largest), draw.randint(0, largest)) for _ in range(count)]
    return [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in pairs]


def main() -> None:
    config, _ = load_expr_config(sys.argv[1:], SumsConfig)
    dataset = tasks(1000, config.largest, config.train.seed)
    with GRPOTrainer(config, train_dataset=dataset) as trainer:
        trainer.train(workflow="agent.CamelAgent")


if __name__ == "__main__":
    main()
