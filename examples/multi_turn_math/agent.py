"""An agent that may try again after a wrong answer.

It also runs against OpenAI: `await RetryAgent().run(task)` with OPENAI_API_KEY set.
"""

from __future__ import annotations

import re
from typing import Any

from openai import AsyncOpenAI

RETRY = "That is wrong. Try again."


class RetryAgent:
    def __init__(self, turns: int = 2) -> None:
        self.turns = turns

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """Solve one task, ``{"question": ..., "answer": ...}``; return 1.0 for a right answer."""
        client = AsyncOpenAI(
            base_url=extra_kwargs.get("base_url"),
            api_key=extra_kwargs.get("api_key"),
            http_client=extra_kwargs.get("http_client"),
            max_retries=0,
        )
        messages: list[Any] = [{"role": "user", "content": data["question"]}]
        for _ in range(self.turns):
            done = await client.chat.completions.create(model="policy", messages=messages)
            said = done.choices[0].message.content or ""
            if re.findall(r"-?\d+", said)[-1:] == [data["answer"]]:
                return 1.0
            messages += [
                {"role": "assistant", "content": said},
                {"role": "user", "content": RETRY},
            ]
        return 0.0
