"""An agent on OpenAI's Agents SDK whose tools come from an MCP server.

It also runs against OpenAI: `await CalculatorAgent().run(task)` with OPENAI_API_KEY set.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelBehaviorError,
    OpenAIProvider,
    RunConfig,
    Runner,
)
from agents.mcp import MCPServerStdio
from openai import AsyncOpenAI

TOOLS = {"command": sys.executable, "args": [str(Path(__file__).with_name("calculator.py"))]}


class CalculatorAgent:
    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """Solve one task, ``{"question": ..., "answer": ...}``; return 1.0 for a right answer."""
        client = AsyncOpenAI(
            base_url=extra_kwargs.get("base_url"),
            api_key=extra_kwargs.get("api_key"),
            http_client=extra_kwargs.get("http_client"),
            max_retries=0,
        )
        # Every episode has its own server, and so its own tools.
        async with MCPServerStdio(params=TOOLS, client_session_timeout_seconds=60) as tools:
            try:
                result = await Runner.run(
                    Agent(name="Calculator", instructions="Use your tools.", mcp_servers=[tools]),
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
        numbers = re.findall(r"-?\d+", str(result.final_output))
        return float(numbers[-1:] == [data["answer"]])
