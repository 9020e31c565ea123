"""OpenAI's Agents SDK with `tool_choice="required"`, over Responses."""

from __future__ import annotations

from typing import Any

from agents import Agent as Adder
from agents import (
    ModelBehaviorError,
    ModelSettings,
    OpenAIProvider,
    RunConfig,
    Runner,
    function_tool,
)
from openai import AsyncOpenAI


@function_tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


class Agent:
    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        client = AsyncOpenAI(
            base_url=extra_kwargs.get("base_url"), api_key=extra_kwargs.get("api_key")
        )
        config = RunConfig(
            model_provider=OpenAIProvider(openai_client=client), model="any", tracing_disabled=True
        )
        adder = Adder(
            name="Adder",
            tools=[add],
            model_settings=ModelSettings(tool_choice="required"),
            tool_use_behavior="stop_on_first_tool",
        )
        try:
            result = await Runner.run(adder, data["question"], run_config=config)
        except ModelBehaviorError:
            # The arguments were none.
            return 0.0
        return float(str(result.final_output) == str(data["answer"]))
