"""Trains one of the agents beside this file: ``python train.py agent=smolagents_agent ...``."""

from __future__ import annotations

import sys
from typing import Any

from any_agent import GRPOConfig, load_expr_config
from trainer import GRPOTrainer

LARGEST = 4  # the largest number that the tiny model can add


class ForcedToolsConfig(GRPOConfig):
    """The run's settings and one of our own."""

    agent: str = ""
    """The module of the agent."""


def sums() -> list[dict[str, Any]]:
    numbers = range(LARGEST + 1)
    return [{"question": f"What is {a} + {b}?", "answer": a + b} for a in numbers for b in numbers]


def main() -> None:
    config, _ = load_expr_config(sys.argv[1:], ForcedToolsConfig)
    agent = f"{config.agent}.Agent"
    with GRPOTrainer(config, train_dataset=sums(), valid_dataset=sums()) as trainer:
        trainer.train(workflow=agent, eval_workflow=agent)


# A worker process imports this file, too, and must not train.
if __name__ == "__main__":
    main()
