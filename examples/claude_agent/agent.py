"""An agent of the Claude Agent SDK with a tool over MCP.

It also runs against Anthropic: `await ClaudeAgent().run(task)` with ANTHROPIC_API_KEY set.
"""

from __future__ import annotations

import re
from typing import Any

from claude_agent_sdk import (
    ClaudeAgentOptions,
    ResultMessage,
    create_sdk_mcp_server,
    query,
    tool,
)


@tool("add", "Add two whole numbers.", {"a": int, "b": int})
async def add(given: dict[str, Any]) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": str(given["a"] + given["b"])}]}


def variables(base_url: str | None, api_key: str | None) -> dict[str, str]:
    """Return the service's variables for Claude Code's program, beside this process's own."""
    given = {
        # Prevents the program's own calls, such as one for a title: they would be in the session.
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        # Omits this machine, its folders and the date after each question.
        "CLAUDE_CODE_SIMPLE": "1",
    }
    if base_url is not None:
        given["ANTHROPIC_BASE_URL"] = base_url.removesuffix("/v1")
    if api_key is not None:
        given["ANTHROPIC_API_KEY"] = api_key
    return given


class ClaudeAgent:
    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """Solve one task, ``{"question": ..., "answer": ...}``; return 1.0 for a right answer."""
        options = ClaudeAgentOptions(
            model="claude-sonnet-4-5",  # selects the API; the policy answers in any case
            env=variables(extra_kwargs.get("base_url"), extra_kwargs.get("api_key")),
            system_prompt="Use your tools.",
            mcp_servers={"calculator": create_sdk_mcp_server("calculator", tools=[add])},
            allowed_tools=["mcp__calculator__add"],
            # Our own agent: without Claude Code's tools and the user's settings.
            tools=[],
            setting_sources=[],
            strict_mcp_config=True,
            max_turns=6,
        )
        said = ""
        async for message in query(prompt=data["question"], options=options):
            if isinstance(message, ResultMessage):
                said = message.result or ""
        numbers = re.findall(r"-?\d+", said)
        return float(numbers[-1:] == [data["answer"]])
