"""OpenAI's SDK as an agent of `/v1/responses`."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import orjson
from openai.types.responses import Response
from pydantic import TypeAdapter

from tests.support.proxy import LIMIT, Proxy

PATH = "/v1/responses"
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "find", "parameters": SCHEMA, "strict": False}
]
CHAT_TOOLS = [
    {"type": "function", "function": {"name": "find", "parameters": SCHEMA, "strict": False}}
]
CALL = '<tool_call>\n{"name": "find", "arguments": {"text": "né"}}\n</tool_call>'


def agent_of(proxy: Proxy, key: str, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{proxy.url}/v1", api_key=key, max_retries=0, timeout=LIMIT, **options
    )


async def create(proxy: Proxy, key: str, *, stream: bool = False, **fields: Any) -> Response:
    """One answer, whole or put together by the SDK."""
    asked: dict[str, Any] = {"model": "gpt-5", "input": "Say a number.", **fields}
    async with agent_of(proxy, key) as agent:
        if not stream:
            answer = await agent.responses.create(**asked)
        else:
            async with agent.responses.stream(**asked) as events:
                last: Any = [event async for event in events][-1]
                # Its own way to the last one's response takes completed ones alone.
                answer = last.response
    # Strictly: the SDK itself takes anything.
    data = orjson.dumps(without_parsed(answer.to_dict(mode="json")))
    strict: Response = TypeAdapter(Response).validate_json(data, strict=True)
    return strict


def without_parsed(value: Any) -> Any:
    """Without what the SDK's stream helper adds to an answer."""
    if isinstance(value, list):
        return [without_parsed(each) for each in value]
    if isinstance(value, dict):
        return {k: without_parsed(v) for k, v in value.items() if not k.startswith("parsed")}
    return value


async def post(proxy: Proxy, key: str | None, path: str = PATH, **fields: Any) -> httpx.Response:
    body = {"model": "gpt-5", "input": "hi", "max_output_tokens": 8, **fields}
    return await proxy.post(path, {k: v for k, v in body.items() if v is not ...}, key)


def said_back(answer: Response) -> list[Any]:
    """As an agent keeps an answer in its input."""
    return [item.to_dict() for item in answer.output]


def output_of(call: Any, text: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call.call_id, "output": text}


def refused(response: httpx.Response, status: int, code: str, param: str | None) -> str:
    """Check an error's shape; its message."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"]) == (code, param), error
    assert "Traceback" not in response.text
    return str(error["message"])
