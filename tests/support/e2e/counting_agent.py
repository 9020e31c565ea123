"""An agent whose reward follows from what the model says, run by a trainer or outside of it."""

from __future__ import annotations

from typing import Any

import openai

AGENT = "tests.support.e2e.counting_agent.CountingAgent"


def items(count: int = 64) -> list[dict[str, Any]]:
    """A dataset whose tasks' names sort as they come."""
    return [{"task_id": f"t{k:03d}", "ask": f"count from {k}"} for k in range(count)]


class CountingAgent:
    """Asks twice, and rewards both answers."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> dict[str, float]:
        client = openai.AsyncOpenAI(
            base_url=extra_kwargs["base_url"],
            api_key=extra_kwargs["api_key"],
            http_client=extra_kwargs["http_client"],
            max_retries=0,
        )
        talk: list[Any] = [{"role": "user", "content": data["ask"]}]
        rewards = {}
        for _ in range(2):
            done = await client.chat.completions.create(model="m", messages=talk)
            text = done.choices[0].message.content or ""
            talk += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
            rewards[done.id] = (sum(map(ord, text)) % 101) / 100
        return rewards
