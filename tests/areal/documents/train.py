"""The training script of AReaL's guide (Apache-2.0) with imports from here.

The guide's command names the agent, ``workflow=...``, so `AgentConfig` has a field of that name, as
the script that it stands for has.
"""

import sys

from any_agent import GRPOConfig, get_custom_dataset, load_expr_config, load_hf_tokenizer
from trainer import PPOTrainer


class AgentConfig(GRPOConfig):
    workflow: str = "my_agent.MathAgent"


def main(args):
    config, _ = load_expr_config(args, AgentConfig)
    tokenizer = load_hf_tokenizer(config.tokenizer_path)

    train_dataset = get_custom_dataset(
        split="train",
        dataset_config=config.train_dataset,
        tokenizer=tokenizer,
    )

    with PPOTrainer(config, train_dataset=train_dataset) as trainer:
        trainer.train(workflow=config.workflow)


if __name__ == "__main__":
    main(sys.argv[1:])
