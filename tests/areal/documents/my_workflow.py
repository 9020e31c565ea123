"""Workflows of AReaL's references (Apache-2.0) as they are written there, with imports from here.

`compute_reward` and `build_tensor_dict` are left to the reader there.
"""

import uuid

import torch

from any_agent import EngineOpenAI, ModelRequest, RolloutWorkflow, stats_tracker, workflow_context


def compute_reward(response, answer):
    return float(answer in (response.choices[0].message.content or ""))


class MyDirectWorkflow(RolloutWorkflow):
    """`MyWorkflow` of the agent workflow reference: the direct approach."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    async def arun_episode(self, engine, data):
        # Create client bound to engine
        client = EngineOpenAI(engine=engine, tokenizer=self.tokenizer)

        # Use like standard OpenAI client
        response = await client.chat.completions.create(
            model="default",
            messages=data["messages"],
        )

        # Set reward and export
        reward = compute_reward(response, data["answer"])
        client.set_last_reward(reward)
        client.apply_reward_discount(turn_discount=0.9)

        return client.export_interactions(style="individual")


class MyWorkflow(RolloutWorkflow):
    """Of the rollout workflow reference."""

    def __init__(self, tokenizer, gconfig, **kwargs):
        self.tokenizer = tokenizer
        self.gconfig = gconfig

    async def arun_episode(self, engine, data):
        # 1. Prepare input
        input_ids = self.tokenizer.encode(data["prompt"])

        # 2. Generate completion
        req = ModelRequest(
            rid=uuid.uuid4().hex,
            input_ids=input_ids,
            gconfig=self.gconfig,
            tokenizer=self.tokenizer,
        )
        resp = await engine.agenerate(req)

        # 3. Compute reward
        reward = self.compute_reward(resp, data)

        # 4. Return tensor dict (or None to reject)
        if reward < 0:
            return None

        return self.build_tensor_dict(resp, reward)

    def compute_reward(self, resp, data):
        said = self.tokenizer.decode(resp.output_tokens, skip_special_tokens=True)
        return -1.0 if "?" not in data["prompt"] else float(said == data["answer"])

    def build_tensor_dict(self, resp, reward):
        prompt, total = resp.input_len, resp.input_len + resp.output_len
        return {
            "input_ids": torch.tensor([resp.input_tokens + resp.output_tokens], dtype=torch.int32),
            "attention_mask": torch.ones(1, total, dtype=torch.bool),
            "loss_mask": torch.tensor([[0] * prompt + [1] * resp.output_len], dtype=torch.int32),
            "logprobs": torch.tensor([[0.0] * prompt + resp.output_logprobs], dtype=torch.float32),
            "rewards": torch.tensor([reward], dtype=torch.float32),
            "versions": torch.tensor([[-1] * prompt + resp.output_versions], dtype=torch.int32),
        }


class ExampleReturn(RolloutWorkflow):
    """The example value of the rollout workflow reference."""

    async def arun_episode(self, engine, data):
        return {
            "input_ids": torch.tensor([[1, 2, 3, 4, 5]], dtype=torch.int32),
            "attention_mask": torch.ones(1, 5, dtype=torch.bool),
            "loss_mask": torch.tensor([[0, 0, 1, 1, 1]], dtype=torch.int32),
            "logprobs": torch.tensor([[0.0, 0.0, -0.5, -0.3, -0.2]], dtype=torch.float32),
            "rewards": torch.tensor([1.0], dtype=torch.float32),
            "versions": torch.tensor([[0, 0, 1, 1, 1]], dtype=torch.int32),
        }


class InContext(RolloutWorkflow):
    """The examples of the workflow context and of the metrics tracker."""

    def __init__(self):
        self.seen = []

    async def arun_episode(self, engine, data):
        # Get current execution context
        ctx = workflow_context.get()

        # Get task ID for logging
        task_id = ctx.task_id

        # Get stats scope based on mode ("rollout" or "eval-rollout")
        scope = workflow_context.stat_scope()
        self.seen.append((task_id, ctx.is_eval, scope))

        # Await HTTP requests with reused client
        session = await workflow_context.get_aiohttp_session()
        assert session is await workflow_context.get_aiohttp_session()

        stats_tracker.get(workflow_context.stat_scope()).scalar(reward=data["reward"])
        return None
