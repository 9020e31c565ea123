"""A LangChain agent with a tool.

It also runs against OpenAI: `await AdderAgent().run(task)` with OPENAI_API_KEY set.
"""

from __future__ import annotations

import re
from typing import Any

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI


def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


class AdderAgent:
    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """Solve one task, ``{"question": ..., "answer": ...}``; return 1.0 for a right answer."""
        model = ChatOpenAI(
            model="policy",
            base_url=extra_kwargs.get("base_url"),
            api_key=extra_kwargs.get("api_key"),
            http_async_client=extra_kwargs.get("http_client"),
            max_retries=0,
        )
        agent = create_agent(model, tools=[add], system_prompt="Use your tools.")
        ended = await agent.ainvoke({"messages": [("user", data["question"])]})
        numbers = re.findall(r"-?\d+", ended["messages"][-1].text)
        return float(numbers[-1:] == [data["answer"]])
