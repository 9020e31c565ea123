"""A CAMEL-AI chat agent with a tool.

It also runs against any provider of an OpenAI-compatible API: `await CamelAgent().run(task,
base_url=..., api_key=...)`.
"""

from __future__ import annotations

import re
from typing import Any

from camel.agents import ChatAgent
from camel.models import ModelFactory
from camel.toolkits import FunctionTool
from camel.types import ModelPlatformType
from camel.utils import BaseTokenCounter


class Characters(BaseTokenCounter):
    """A counter that decides when a conversation is too long; CAMEL's own fetches a vocabulary."""

    def count_tokens_from_messages(self, messages: list[Any]) -> int:
        return len(str(messages))

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))


def add(a: int, b: int) -> int:
    """Add two whole numbers.

    Args:
        a (int): One.
        b (int): The other.
    """
    return a + b


class CamelAgent:
    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """Solve one task, ``{"question": ..., "answer": ...}``; return 1.0 for a right answer."""
        model = ModelFactory.create(
            model_platform=ModelPlatformType.OPENAI_COMPATIBLE_MODEL,
            model_type="policy",
            url=extra_kwargs.get("base_url"),
            api_key=extra_kwargs.get("api_key"),
            token_counter=Characters(),
        )
        agent = ChatAgent("Use your tools.", model=model, tools=[FunctionTool(add)])
        answer = await agent.astep(data["question"])
        numbers = re.findall(r"-?\d+", answer.msgs[0].content or "")
        return float(numbers[-1:] == [data["answer"]])
