"""Train the agent:

python examples/multi_turn_math/train.py --config examples/multi_turn_math/config.yaml
"""

from __future__ import annotations

import random
import sys

from any_agent import GRPOConfig, load_expr_config
from trainer import GRPOTrainer


class MathConfig(GRPOConfig):
    """The run's settings and two of our own."""

    largest: int = 99_999
    """The largest number that is added."""
    turns: int = 2
    """The number of answers that the agent may give."""


def tasks(count: int, largest: int, seed: int) -> list[dict[str, str]]:
    draw = random.Random(seed)
    pairs = [(draw.randint(0, largest), draw.randint(0, largest)) for _ in range(count)]
    return [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in pairs]


def main() -> None:
    config, _ = load_expr_config(sys.argv[1:], MathConfig)
    train = tasks(1000, config.largest, config.train.seed)
    valid = tasks(50, config.largest, config.train.seed + 1)
    turns = {"turns": config.turns}
    with GRPOTrainer(config, train_dataset=train, valid_dataset=valid) as trainer:
        trainer.train(
            workflow="agent.RetryAgent",
            workflow_kwargs=turns,
            eval_workflow="agent.RetryAgent",
            eval_workflow_kwargs=turns,
        )


if __name__ == "__main__":
    main()
