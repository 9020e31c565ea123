"""An agent that blocks, and makes its client as AReaL's guide does: with a key that is none."""

from __future__ import annotations

import os
from typing import Any

from openai import OpenAI


class BlockingAgent:
    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        client = OpenAI(base_url=os.environ["OPENAI_BASE_URL"], api_key="DUMMY")
        answer = client.chat.completions.create(model="default", messages=data["messages"])
        return float(data["answer"] in (answer.choices[0].message.content or ""))
