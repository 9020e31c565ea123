"""An agent for the excerpts that run any agent."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI

from any_agent import RolloutWorkflow


class Answers:
    """Asks once; a reward of 1 for an answer that has the right number in it."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        client = AsyncOpenAI(
            base_url=extra_kwargs["base_url"], http_client=extra_kwargs["http_client"]
        )
        answer = await client.chat.completions.create(model="default", messages=data["messages"])
        return float(data["answer"] in (answer.choices[0].message.content or ""))


class Nothing(RolloutWorkflow):
    """A workflow that is found by its dotted name."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> None:
        """Reject every episode."""
