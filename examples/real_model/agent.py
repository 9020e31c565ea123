"""An agent that asks for a sum.

It also runs against OpenAI: `await SumAgent().run(task)` with OPENAI_API_KEY set.
"""

from __future__ import annotations

import re
from typing import Any

from openai import AsyncOpenAI


class SumAgent:
    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """Ask for ``data["question"]``; return 1.0 if the answer's last number is right."""
        client = AsyncOpenAI(
            base_url=extra_kwargs.get("base_url"),
            api_key=extra_kwargs.get("api_key"),
            http_client=extra_kwargs.get("http_client"),
            max_retries=0,
        )
        question: list[Any] = [{"role": "user", "content": data["question"]}]
        done = await client.chat.completions.create(model="policy", messages=question)
        said = done.choices[0].message.content or ""
        return float(re.findall(r"\d+", said)[-1:] == [data["answer"]])
