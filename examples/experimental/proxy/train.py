"""Train the agent that the command names, on a dataset:

python3 examples/experimental/proxy/train.py --config examples/experimental/proxy/config.yaml \
    scheduler.type=local workflow=my_agent.MathAgent
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from any_agent import GRPOConfig, get_custom_dataset, load_expr_config, load_hf_tokenizer
from trainer import PPOTrainer


def main(args: Sequence[str]) -> None:
    config, _ = load_expr_config(args, GRPOConfig)
    tokenizer = load_hf_tokenizer(config.tokenizer_path)
    train_dataset = get_custom_dataset(
        split="train", dataset_config=config.train_dataset, tokenizer=tokenizer
    )
    with PPOTrainer(config, train_dataset=train_dataset) as trainer:
        # The agent is the setting `workflow`.
        trainer.train()


# A worker process imports this file, too, and must not train.
if __name__ == "__main__":
    main(sys.argv[1:])
