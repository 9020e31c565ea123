"""The training script of AReaL's guide (Apache-2.0) with imports from here.

The guide's command names the agent: ``workflow=...``.
"""

import sys

from any_agent import GRPOConfig, get_custom_dataset, load_expr_config, load_hf_tokenizer
from trainer import PPOTrainer


def main(args):
    config, _ = load_expr_config(args, GRPOConfig)
    tokenizer = load_hf_tokenizer(config.tokenizer_path)

    train_dataset = get_custom_dataset(
        split="train",
        dataset_config=config.train_dataset,
        tokenizer=tokenizer,
    )

    with PPOTrainer(config, train_dataset=train_dataset) as trainer:
        trainer.train()


if __name__ == "__main__":
    main(sys.argv[1:])
