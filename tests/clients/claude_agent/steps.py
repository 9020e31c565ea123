"""What an agent does with the Claude Agent SDK, whose bundled program makes the calls."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from claude_agent_sdk import (
    AssistantMessage,
    ClaudeAgentOptions,
    ClaudeSDKClient,
    ResultMessage,
    StreamEvent,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
    create_sdk_mcp_server,
    tool,
)

ASK = "What is 2 and 3?"
KINDS = {TextBlock: "text", ThinkingBlock: "thinking", ToolUseBlock: "tool_use"}


@tool("add", "Adds two numbers.", {"a": int, "b": int})
async def add(given: dict[str, Any]) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": str(given["a"] + given["b"])}]}


def options(**more: Any) -> ClaudeAgentOptions:
    """An agent of one's own: no tools of Claude Code's, nothing of the user's."""
    own = {"tools": [], "setting_sources": [], "strict_mcp_config": True}
    return ClaudeAgentOptions(model="claude-sonnet-4-5", max_turns=6, **{**own, **more})


def with_tools(**more: Any) -> ClaudeAgentOptions:
    sums = create_sdk_mcp_server("sums", tools=[add])
    return options(mcp_servers={"sums": sums}, allowed_tools=["mcp__sums__add"], **more)


async def plain() -> dict[str, Any]:
    return await _once(options())


async def stream() -> dict[str, Any]:
    return await _once(options(include_partial_messages=True))


async def three_turns() -> dict[str, Any]:
    said = []
    async with ClaudeSDKClient(options()) as client:
        for text in (ASK, "And 1?", "And 2?"):
            await client.query(text)
            said.append((await _read(client.receive_response()))["result"])
    return {"said": said}


async def tools() -> dict[str, Any]:
    return await _once(with_tools())


async def tools_streamed() -> dict[str, Any]:
    return await _once(with_tools(include_partial_messages=True))


async def thinking() -> dict[str, Any]:
    return await _once(with_tools(thinking={"type": "enabled", "budget_tokens": 2048}))


async def whole_preset() -> dict[str, Any]:
    """Claude Code's own prompt and all of its tools."""
    preset = {"type": "preset", "preset": "claude_code"}
    return await _once(options(tools=preset, system_prompt=preset))


async def refused() -> dict[str, Any]:
    said = await _once(options(), "many words " * 40000)
    return {**said, "result": said["result"][: len("Prompt is too long")]}


async def _once(options: ClaudeAgentOptions, text: str = ASK) -> dict[str, Any]:
    async with ClaudeSDKClient(options) as client:
        await client.query(text)
        return await _read(client.receive_response())


async def _read(messages: AsyncIterator[Any]) -> dict[str, Any]:
    out: dict[str, Any] = {"blocks": [], "streamed": "", "calls": []}
    async for message in messages:
        if isinstance(message, AssistantMessage):
            out["blocks"] += [KINDS[type(block)] for block in message.content]
            calls = (b for b in message.content if isinstance(b, ToolUseBlock))
            out["calls"] += [[call.name, call.input] for call in calls]
        elif isinstance(message, StreamEvent):
            out["streamed"] += message.event.get("delta", {}).get("text", "")
        elif isinstance(message, ResultMessage):
            usage = message.usage or {}
            out |= {"result": message.result, "failed": message.is_error}
            out |= {"turns": message.num_turns, "output_tokens": usage.get("output_tokens")}
    return out
