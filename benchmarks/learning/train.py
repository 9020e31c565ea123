"""A researcher's script: ``python train.py --config my.yaml task=tool_use train.lr=1e-3``."""

from __future__ import annotations

import sys
from typing import Any, Literal

from any_agent import GRPOConfig, get_custom_dataset, load_expr_config
from benchmarks.learning.retry_math import DISCOUNT, MAX_TURNS, RETRY
from trainer import GRPOTrainer


class LearningConfig(GRPOConfig):
    task: Literal["retry_math", "tool_use"] = "retry_math"
    max_turns: int = MAX_TURNS


def main(arguments: list[str]) -> None:
    config, _ = load_expr_config(arguments, LearningConfig)
    train = get_custom_dataset(dataset_config=config.train_dataset)
    valid = get_custom_dataset(dataset_config=config.valid_dataset)
    workflow, kwargs = workflow_of(config)
    with GRPOTrainer(config, train_dataset=train, valid_dataset=valid) as trainer:
        trainer.train(
            workflow=workflow,
            workflow_kwargs=kwargs,
            eval_workflow=workflow,
            eval_workflow_kwargs=kwargs,
        )


def workflow_of(config: LearningConfig) -> tuple[str, dict[str, Any]]:
    if config.task == "tool_use":
        return "benchmarks.learning.tool_use.PriceAgent", {}
    return "any_agent.workflow.MultiTurnWorkflow", {
        "reward_fn": "benchmarks.learning.retry_math.reward_fn",
        "gconfig": config.gconfig,
        "tokenizer": config.tokenizer_path,
        "max_turns": config.max_turns,
        "turn_discount": DISCOUNT,
        "feedback": RETRY,
    }


if __name__ == "__main__":
    main(sys.argv[1:])
