"""An agent on OpenAI's Agents SDK with two tools, whose answers math-verify checks.

It also runs against OpenAI: `asyncio.run(CalculatorAgent().run(task))` with OPENAI_API_KEY set.
"""

from __future__ import annotations

from typing import Any

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelBehaviorError,
    OpenAIProvider,
    RunConfig,
    Runner,
    function_tool,
)
from math_verify import parse, verify
from openai import AsyncOpenAI

from any_agent import AsyncRewardWrapper


@function_tool
def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers."""
    return a * b


def solved(said: str, answer: str) -> float:
    """Return 1.0 if both are mathematically equal: `\\boxed{6/2}` is 3."""
    return float(verify(parse(answer), parse(said)))


# math-verify sometimes computes for seconds, and stops itself by a signal, which works only in a
# main thread. So it runs in a process of its own, and delays no other run.
verdict = AsyncRewardWrapper(solved, timeout_seconds=30)


class CalculatorAgent:
    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """Solve one task, ``{"question": ..., "answer": ...}``; return 1.0 for a right answer."""
        client = AsyncOpenAI(
            base_url=extra_kwargs.get("base_url"),
            api_key=extra_kwargs.get("api_key"),
            http_client=extra_kwargs.get("http_client"),
            max_retries=0,
        )
        try:
            result = await Runner.run(
                Agent(name="Calculator", instructions="Use your tools.", tools=[add, multiply]),
                data["question"],
                max_turns=6,
                run_config=RunConfig(
                    model_provider=OpenAIProvider(openai_client=client),
                    model="policy",
                    tracing_disabled=True,
                ),
            )
        except (MaxTurnsExceeded, ModelBehaviorError):
            # The model's own error: it never ends, or calls an unknown tool.
            return 0.0
        return await verdict(str(result.final_output), data["answer"])
