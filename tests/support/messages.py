"""Anthropic's SDK as the agent."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
from anthropic.types import Message
from pydantic import TypeAdapter

from any_agent.protocol.error_bodies import REQUEST_ID
from tests.support.proxy import HELLO, LIMIT, Proxy

PATH = "/v1/messages"
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}}
TOOLS: list[dict[str, Any]] = [{"name": "find", "input_schema": SCHEMA}]
CHAT_TOOLS = [{"type": "function", "function": {"name": "find", "parameters": SCHEMA}}]
ARGUMENTS = '{"text": "a long text"}'
CALL = f'<tool_call>\n{{"name": "find", "arguments": {ARGUMENTS}}}\n</tool_call>'


def agent_of(proxy: Proxy, key: str, **options: Any) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(
        base_url=proxy.url, api_key=key, max_retries=0, timeout=LIMIT, **options
    )


async def create(proxy: Proxy, key: str, *, stream: bool = False, **fields: Any) -> Message:
    """One answer, whole or put together by the SDK."""
    asked: dict[str, Any] = {"model": "claude", "max_tokens": 200, "messages": HELLO, **fields}
    async with agent_of(proxy, key) as agent:
        if not stream:
            message = await agent.messages.create(**asked)
        else:
            async with agent.messages.stream(**asked) as events:
                message = await events.get_final_message()
    # Strictly: the SDK itself takes anything.
    strict: Message = TypeAdapter(Message).validate_json(message.to_json(), strict=True)
    return strict


async def post(proxy: Proxy, key: str | None, path: str = PATH, **fields: Any) -> httpx.Response:
    body = {"model": "claude", "max_tokens": 8, "messages": HELLO, **fields}
    body = {name: value for name, value in body.items() if value is not ...}
    headers = {"x-api-key": key, "anthropic-version": "2023-06-01"} if key is not None else {}
    return await proxy.http.post(path, json=body, headers=headers)


def said_back(message: Message) -> dict[str, Any]:
    """As an agent keeps an answer in its conversation."""
    return {"role": "assistant", "content": [block.to_dict() for block in message.content]}


def refused(response: httpx.Response, status: int, kind: str, code: str) -> str:
    """Check an error's shape; its message."""
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["request_id"].startswith("req_")
    assert response.headers[REQUEST_ID] == body["request_id"]
    error = body["error"]
    assert (error["type"], error["code"]) == (kind, code), error
    assert error["details"]["error_code"] == code
    assert "Traceback" not in response.text
    return str(error["message"])
