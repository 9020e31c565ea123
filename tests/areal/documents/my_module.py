"""MyAgent and MySyncAgent of AReaL's documents (Apache-2.0), as they are written there.

`compute_reward` and the imports of the first are left to the reader there. The second gives
`api_key` twice, which is a syntax error; the first one of the two is kept.
"""

from __future__ import annotations

import os

from openai import (
    AsyncOpenAI,
    OpenAI,  # Sync client is OK
)


def compute_reward(response, answer):
    return float(answer in (response.choices[0].message.content or ""))


class MyAgent:
    async def run(self, data, **extra_kwargs):
        # AReaL injects these kwargs
        http_client = extra_kwargs.get("http_client")
        base_url = extra_kwargs.get("base_url") or os.getenv("OPENAI_BASE_URL")
        api_key = extra_kwargs.get("api_key") or os.getenv("OPENAI_API_KEY")

        # Standard OpenAI SDK usage
        client = AsyncOpenAI(
            base_url=base_url,
            api_key=api_key,
            http_client=http_client,
            max_retries=0,
        )

        response = await client.chat.completions.create(
            model="default",
            messages=data["messages"],
        )

        # Return reward (float) or reward dict
        return compute_reward(response, data["answer"])


class MySyncAgent:
    async def run(self, data, **extra_kwargs):
        # In subproc mode, base_url and api_key come from environment
        client = OpenAI(
            base_url=os.environ.get("OPENAI_BASE_URL"),
            api_key=os.environ.get("OPENAI_API_KEY"),
        )

        response = client.chat.completions.create(
            model="default",
            messages=data["messages"],
        )

        return compute_reward(response, data["answer"])
