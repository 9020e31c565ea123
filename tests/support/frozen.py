"""A proxy with frozen models beside its policy, which a local provider serves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx
import orjson
import pytest

from proxy_ext import litellm_shim
from proxy_ext.litellm_streams import Event
from tests.support.proxy import HELLO, Proxy, config_for

SECRET = "provider-secret-8a1f"
VARIABLE = "TEST_PROVIDER_KEY"
PRICE = {"input_cost_per_token": 0.01, "output_cost_per_token": 0.1}
"""USD: an answer of three words costs 0.37."""
ANSWER_USD = 0.37
EMBEDDING_USD = 0.07


def models(url: str, **judge: Any) -> list[dict[str, Any]]:
    """What an operator may configure."""
    return [
        entry("judge", f"{url}/v1", "openai/gpt-judge", **judge),
        entry("vectors", f"{url}/v1", "openai/text-e"),
        entry("claude", url, "anthropic/claude-x"),
    ]


def entry(name: str, base: str, model: str, **info: Any) -> dict[str, Any]:
    key = f"os.environ/{VARIABLE}"
    return {
        "model_name": name,
        "litellm_params": {"model": model, "api_base": base, "api_key": key},
        "model_info": {**PRICE, **info},
    }


def settings(model_list: list[dict[str, Any]], *more: str) -> list[str]:
    return [f"frozen.model_list={json.dumps(model_list)}", *more]


def provider_of(root: Any, lines: list[str]) -> litellm_shim.LiteLLMProvider | None:
    """LiteLLM's, as a service makes it from these settings."""
    return litellm_shim.load_provider(config_for(root, *lines).frozen.model_list)


@contextmanager
def secret_in_environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, SECRET)
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        yield


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": "judge", "messages": HELLO, **fields}


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "Say a number."},
    "/v1/responses": {"input": "Say a number."},
    "/v1/messages": {"messages": HELLO, "max_tokens": 16},
}
"""A call of each API."""


def calls() -> list[tuple[str, str]]:
    """Each route with each model; of Anthropic's there are no legacy completions."""
    paths = [(path, model) for path in BODIES for model in ("judge", "claude")]
    return [each for each in paths if each != ("/v1/completions", "claude")]


async def events_of(
    proxy: Proxy, path: str, body: dict[str, Any], key: str
) -> tuple[list[dict[str, Any]], str]:
    """A stream's events, and how its text ends."""
    headers = {"Authorization": f"Bearer {key}"}
    async with proxy.http.stream(
        "POST", path, json={**body, "stream": True}, headers=headers
    ) as response:
        text = (await response.aread()).decode()
        assert response.status_code == 200, text
        assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [orjson.loads(line) for line in lines if line != "[DONE]"], text[-20:]


def said(path: str, body: dict[str, Any]) -> str:
    """The text of a whole answer."""
    match path.removeprefix("/v1"):
        case "/chat/completions":
            return str(body["choices"][0]["message"]["content"])
        case "/completions":
            return str(body["choices"][0]["text"])
        case "/responses":
            return "".join(
                part["text"] for item in body["output"] for part in item.get("content", ())
            )
        case _:
            return "".join(block.get("text", "") for block in body["content"])


def streamed(path: str, events: list[dict[str, Any]]) -> str:
    """The text that events add up to."""
    match path.removeprefix("/v1"):
        case "/chat/completions":
            choices = [choice for event in events for choice in event["choices"]]
            return "".join(choice["delta"].get("content") or "" for choice in choices)
        case "/completions":
            return "".join(choice["text"] for event in events for choice in event["choices"])
        case "/responses":
            kind = "response.output_text.delta"
            return "".join(event["delta"] for event in events if event["type"] == kind)
        case _:
            deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
            return "".join(delta.get("text", "") for delta in deltas)


def refused(response: httpx.Response, status: int, code: str) -> str:
    """Check an error of OpenAI's shape; its message."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["code"] == code, error
    return str(error["message"])


class Scripted:
    """A deployment of one's own: it answers "Four it is." for 0.37 USD, when it may."""

    keeps_responses = False
    priced = True
    weight = 1.0

    def __init__(self) -> None:
        self.asked: list[Mapping[str, Any]] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.price: float | None = ANSWER_USD
        self.usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}

    async def complete(self, api: str, params: Mapping[str, Any], within: float) -> dict[str, Any]:
        self.asked.append(params)
        await self.may_answer.wait()
        message = {"role": "assistant", "content": "Four it is."}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        answer = {"id": "x", "object": "chat.completion", "choices": [choice]}
        return {**answer, "usage": self.usage}

    async def stream(
        self, api: str, params: Mapping[str, Any], within: float
    ) -> AsyncGenerator[Event]:
        self.asked.append(params)
        await self.may_answer.wait()
        for word in ("Four", " it", " is."):
            yield {"id": "x", "choices": [{"index": 0, "delta": {"content": word}}]}
        yield {"id": "x", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}

    def cost(self, api: str, usage: Mapping[str, Any]) -> float | None:
        return self.price

    def count(self, text: str) -> int:
        return len(text.split())


class ScriptedProvider:
    """One model, the judge."""

    def __init__(self) -> None:
        self.judge = Scripted()
        self.deployments = {"judge": [self.judge]}
        self.closed = False

    async def close(self) -> None:
        self.closed = True
