"""Helpers of the direct client's tests."""

from __future__ import annotations

from typing import Any

from any_agent.chat import ChatFormat

MODEL = "gpt-4o"
HELLO: list[Any] = [{"role": "user", "content": "Say a number."}]
MORE: dict[str, Any] = {"role": "user", "content": "And another one?"}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
                "additionalProperties": False,
            },
        },
    }
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


def said(chat: ChatFormat, text: str) -> list[int]:
    """An answer's token ids, with their end."""
    return [*chat.encode(text, special=False), chat.stop_token_ids[0]]
