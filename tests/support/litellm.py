"""LiteLLM with a configuration file: stock, in a process of its own, and in a rank of ours."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from any_agent.chat import load_chat_format
from tests.support.fake_provider import Provider
from tests.support.ports import own_port
from tests.support.proxy import HELLO
from tests.support.real_parts import (
    await_url,
    in_a_thread,
    process,
    proxy_process,
    write_config,
)
from tests.support.scripted_engine import ScriptedEngine

ADMIN = "sk-the-operators-own-admin-key-4f1c"
SECRET = "provider-secret-8a1f"
VARIABLE = "TEST_PROVIDER_KEY"
CALLBACK = """
import json, os
from litellm.integrations.custom_logger import CustomLogger


class Log(CustomLogger):
    async def async_log_success_event(self, kwargs, response_obj, start_time, end_time):
        payload = kwargs["standard_logging_object"]
        about = kwargs["litellm_params"]["metadata"]
        line = {
            "id": payload["id"],
            "call": kwargs["litellm_call_id"],
            "model": payload["model_group"] or payload["model"],
            "tokens": [payload["prompt_tokens"], payload["completion_tokens"]],
            "cost": payload["response_cost"],
            "messages": payload["messages"],
            "about": {k: v for k, v in about.items() if isinstance(v, (str, int, float))},
        }
        with open(os.environ["TEST_CALLBACK_LOG"], "a") as file:
            file.write(json.dumps(line) + "\\n")


log = Log()
"""
"""A callback of the operator's: it appends what it is told to a file."""
GUARDRAILS = """
from fastapi import HTTPException
from litellm.integrations.custom_guardrail import CustomGuardrail


class Before(CustomGuardrail):
    async def async_pre_call_hook(self, user_api_key_dict, cache, data, call_type):
        text = str(data["messages"][-1]["content"])
        if "forbidden" in text:
            raise HTTPException(status_code=400, detail="no such word here")
        if "rewrite" in text:
            data["messages"][-1]["content"] = "something else"
        return data


class After(CustomGuardrail):
    async def async_post_call_success_hook(self, data, user_api_key_dict, response):
        if "judge me" in str(data["messages"]):
            raise HTTPException(status_code=400, detail="not this answer")


class Strict(CustomGuardrail):
    async def async_post_call_success_hook(self, data, user_api_key_dict, response):
        if "veto me" in str(data["messages"]):
            raise HTTPException(status_code=400, detail="not this session")
"""
"""Guardrails of the operator's."""


def examples(url: str) -> dict[str, Any]:
    """LiteLLM's documented examples in one file: a simple model, two places of one name, fallbacks,
    a wildcard, an alias, and a callback."""

    def model(name: str, model: str, base: str = f"{url}/v1", **more: Any) -> dict[str, Any]:
        key = f"os.environ/{VARIABLE}"
        params = {"model": model, "api_base": base, "api_key": key, **more}
        return {"model_name": name, "litellm_params": params}

    guards = (("before", "pre_call"), ("after", "post_call"), ("strict", "post_call"))
    return {
        "model_list": [
            model("planner", "openai/gpt-4o-mini"),
            model("backup", "openai/gpt-4o"),
            model("balanced", "openai/gpt-a", rpm=600),
            model("balanced", "openai/gpt-a", rpm=600),
            model("any/*", "openai/*"),
            model("vectors", "openai/text-embedding-3-small"),
            model("claude", "anthropic/claude-x", url),
        ],
        "litellm_settings": {
            "drop_params": True,
            "num_retries": 0,
            "fallbacks": [{"planner": ["backup"]}],
            "callbacks": "callbacks.log",
        },
        "router_settings": {"model_group_alias": {"thinker": "backup"}},
        "general_settings": {"master_key": ADMIN},
        "guardrails": [
            {
                "guardrail_name": name,
                "litellm_params": {"guardrail": f"guards.{name.title()}", "mode": mode},
            }
            for name, mode in guards
        ],
    }


def write_litellm(folder: Path, data: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "callbacks.py").write_text(CALLBACK)
    (folder / "guards.py").write_text(GUARDRAILS)
    path = folder / "litellm.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def client(url: str, key: str = ADMIN) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.AsyncClient(base_url=url, timeout=60, headers=headers)


@asynccontextmanager
async def stock(path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Stock LiteLLM's proxy."""
    port, log = own_port(), path.parent / "stock.log"
    serve = ["--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"]
    environment = {
        "CONFIG_FILE_PATH": str(path),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "TEST_CALLBACK_LOG": str(path.parent / "told.jsonl"),
        VARIABLE: SECRET,
    }
    context = process(log, "uvicorn", "litellm.proxy.proxy_server:app", *serve, **environment)
    async with in_a_thread(context) as child:
        url = f"http://127.0.0.1:{port}"
        await asyncio.to_thread(await_url, f"{url}/health/liveliness", child, log)
        async with client(url) as http:
            yield http


@asynccontextmanager
async def rank(
    path: Path,
    model: Path,
    engine_url: str,
    *,
    own: Mapping[str, Any] | None = None,
    number: int = 0,
    ranks: int = 1,
    journal: str | None = None,
    **sections: Any,
) -> AsyncIterator[httpx.AsyncClient]:
    """A rank of ours with the same configuration, LiteLLM started; the environment is the
    caller's."""
    folder = path.parent / "ours"
    folder.mkdir(exist_ok=True)
    server = {"ranks": ranks, "admin_key": ADMIN, "journal": journal}
    section = {"config": str(path), **(own or {})}
    config = write_config(folder, model, litellm=section, server=server, **sections)
    context = proxy_process(config, engine_url, own_port(), "--rank", str(number))
    async with in_a_thread(context) as (_, url), client(url) as http:
        await ready(http)
        yield http


class Rank:
    """A rank of ours beside a provider and an engine of the test's."""

    def __init__(
        self, http: httpx.AsyncClient, provider: Provider, engine: ScriptedEngine, folder: Path
    ) -> None:
        self.http = http
        self.provider = provider
        self.engine = engine
        self.folder = folder

    def told(self) -> list[dict[str, Any]]:
        """Return the lines that the callback wrote."""
        return [json.loads(line) for line in (self.folder / "told.jsonl").read_text().splitlines()]


@asynccontextmanager
async def running(
    folder: Path, model: Path, change: Callable[[dict[str, Any]], None], **options: Any
) -> AsyncIterator[Rank]:
    """A rank with LiteLLM's examples as ``change`` alters them."""
    provider, engine = Provider(), ScriptedEngine(decode=load_chat_format(str(model)).decode)
    told = folder / "told.jsonl"
    told.touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, SECRET)
        patch.setenv("TEST_CALLBACK_LOG", str(told))
        async with provider.serve() as url, engine.serve():
            data = examples(url)
            change(data)
            path = write_litellm(folder, data)
            async with rank(path, model, engine.url, **options) as http:
                yield Rank(http, provider, engine, folder)


async def ready(http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(240):
        while "litellm" in (await http.get("/readyz")).json():  # noqa: ASYNC110
            await asyncio.sleep(0.25)


async def events_counted(http: httpx.AsyncClient) -> dict[str, float]:
    """Return how many events of the policy's calls had each outcome, by the rank's metrics."""
    found = re.findall(
        r'^any_agent_litellm_events_total\{.*?outcome="(\w+)".*\} (\S+)$',
        (await http.get("/metrics")).text,
        re.MULTILINE,
    )
    counted: dict[str, float] = {}
    for outcome, number in found:
        counted[outcome] = counted.get(outcome, 0.0) + float(number)
    return counted


async def session(http: httpx.AsyncClient, **fields: Any) -> dict[str, str]:
    """The headers of a new session's calls."""
    response = await http.post("/rl/v1/start_session", json={"mode": "eval", **fields})
    assert response.status_code == 200, response.text
    return {"Authorization": f"Bearer {response.json()['api_key']}"}


async def call(
    http: httpx.AsyncClient, key: dict[str, str], model: str, **fields: Any
) -> httpx.Response:
    """Return the answer to a chat call, which is no refusal."""
    body = {"model": model, "messages": HELLO, "max_tokens": 4, **fields}
    answer = await http.post("/v1/chat/completions", json=body, headers=key)
    assert answer.status_code == 200, (model, answer.text)
    return answer


async def end(http: httpx.AsyncClient, key: dict[str, str]) -> None:
    """Give a session half a point, and end it."""
    for path, body in (("set_reward", {"reward": 0.5}), ("finalize", {})):
        answer = await http.post(f"/rl/v1/{path}", json=body, headers=key)
        assert answer.status_code == 200, answer.text
