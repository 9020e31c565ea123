"""CamelRLVRWorkflow of AReaL's guide (Apache-2.0), with imports and names from here."""

import sys

from camel.agents import ChatAgent
from transformers import PreTrainedTokenizerFast

from any_agent import (
    AsyncRewardWrapper,
    EngineOpenAI,
    GenerationHyperparameters,
    GRPOConfig,
    RolloutWorkflow,
    get_custom_dataset,
    load_expr_config,
    load_hf_tokenizer,
)
from any_agent.camel.openai_model import AnyAgentOpenAICompatibleModel
from trainer import PPOTrainer


def math_reward_fn(result, answer):
    """Simple reward function: 1.0 if correct, 0.0 otherwise."""
    return 1.0 if result.strip() == answer.strip() else 0.0


class CamelMathAgent:
    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self.tokenizer = tokenizer
        # Wrap reward function for async execution
        self.async_reward_fn = AsyncRewardWrapper(math_reward_fn)

    async def run_agent(self, data, client: EngineOpenAI):
        """Run agent on a dataset sample."""
        # Create agent with AReaL OpenAI-compatible model
        agent = ChatAgent(
            system_message="You are a helpful math assistant.",
            model=AnyAgentOpenAICompatibleModel(
                openai_client=client, tokenizer=self.tokenizer, model_type="areal"
            ),
        )

        # Run agent
        response = await agent.astep(data["messages"][-1]["content"])
        content = response.msg.content

        # Evaluate reward and set on client
        reward = await self.async_reward_fn(result=content, answer=data["answer"])
        client.set_last_reward(reward)

        return reward


class CamelRLVRWorkflow(RolloutWorkflow):
    def __init__(
        self,
        gconfig: GenerationHyperparameters,
        tokenizer: PreTrainedTokenizerFast,
    ):
        self.gconfig = gconfig
        self.tokenizer = tokenizer
        self.agent = CamelMathAgent(tokenizer=self.tokenizer)

    async def arun_episode(self, engine, data):
        """Run one training episode."""
        # Create one client per trajectory
        client = EngineOpenAI(engine=engine, tokenizer=self.tokenizer)

        # Run agent
        await self.agent.run_agent(data=data, client=client)

        # Apply reward discounting for multi-turn conversations
        client.apply_reward_discount(turn_discount=0.9)
        # Export interactions with token-level data
        return client.export_interactions(style="individual")


def main(args):
    config, _ = load_expr_config(args, GRPOConfig)
    tokenizer = load_hf_tokenizer(config.tokenizer_path)
    train_dataset = get_custom_dataset(
        split="train", dataset_config=config.train_dataset, tokenizer=tokenizer
    )
    workflow = CamelRLVRWorkflow(
        gconfig=config.gconfig,
        tokenizer=tokenizer,
    )
    with PPOTrainer(config, train_dataset=train_dataset) as trainer:
        trainer.train(workflow=workflow)


if __name__ == "__main__":
    main(sys.argv[1:])
