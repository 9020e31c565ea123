"""Two ranks of one service with an operator's LiteLLM configuration and one Redis server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from any_agent.chat import load_chat_format
from tests.support import litellm
from tests.support.fake_provider import Provider
from tests.support.redis_server import RedisServer
from tests.support.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.service

LIMIT = 4
"""Calls a minute of the limited model."""


def limited(data: dict[str, Any]) -> None:
    """Give LiteLLM's examples a model with a limit, and ask for its being kept."""
    planner = data["model_list"][0]["litellm_params"]
    data["model_list"].append(
        {"model_name": "limited", "litellm_params": {**planner, "rpm": LIMIT}}
    )
    settings, router = data["litellm_settings"], data["router_settings"]
    del settings["callbacks"], settings["fallbacks"]
    router["optional_pre_call_checks"] = ["enforce_model_rate_limits"]


def cached(data: dict[str, Any], port: int) -> None:
    """Give them a model with a cache, in a Redis that has LiteLLM's counters, too."""
    planner = data["model_list"][0]["litellm_params"]
    params = {**planner, "cache": {"use-cache": True}}
    data["model_list"].append({"model_name": "cached", "litellm_params": params})
    where = {"host": "127.0.0.1", "port": port}
    data["litellm_settings"] |= {
        "cache": True,
        "cache_params": {"type": "redis", **where, "mode": "default_off"},
    }
    data["router_settings"] |= {"redis_host": where["host"], "redis_port": port}


class Two:
    """Two ranks of one service, and the provider of LiteLLM's models."""

    def __init__(self, provider: Provider) -> None:
        self.provider = provider
        self.ranks: list[tuple[httpx.AsyncClient, dict[str, str]]] = []

    async def ask(self, rank: int, model: str) -> int:
        """Call a model at a rank; return the status."""
        http, key = self.ranks[rank]
        body = {"model": model, "messages": [{"role": "user", "content": "Hello."}]}
        answer = await http.post("/v1/chat/completions", json=body, headers=key)
        return answer.status_code

    async def have_one_limit(self) -> bool:
        """Return whether one rank may use the whole limit, which leaves the other nothing."""
        # LiteLLM counts by the minute of the clock.
        if (left := 60 - time.time() % 60) < 20:
            await asyncio.sleep(left)
        first = [await self.ask(0, "limited") for _ in range(LIMIT)]
        second = [await self.ask(1, "limited") for _ in range(LIMIT)]
        return (first, second) == ([200] * LIMIT, [429] * LIMIT)


@asynccontextmanager
async def two_ranks(
    folder: Path, model: Path, change: Callable[[dict[str, Any]], None], **options: Any
) -> AsyncIterator[Two]:
    """Two ranks with LiteLLM's examples as ``change`` alters them."""
    provider = Provider()
    engine = ScriptedEngine(decode=load_chat_format(str(model)).decode)
    two = Two(provider)
    async with provider.serve() as url, engine.serve(), AsyncExitStack() as stack:
        data = litellm.examples(url)
        change(data)
        path = litellm.write_litellm(folder, data)
        for number in range(2):
            rank = litellm.rank(path, model, engine.url, number=number, ranks=2, **options)
            http = await stack.enter_async_context(rank)
            two.ranks.append((http, await litellm.session(http)))
        yield two


def log_of(folder: Path) -> str:
    return (folder / "ours" / "proxy.log").read_text()


async def test_ranks_share_limits_and_cache_in_the_redis_of_their_configuration(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(litellm.VARIABLE, litellm.SECRET)
    with RedisServer(tmp_path / "redis") as redis:

        def change(data: dict[str, Any]) -> None:
            limited(data)
            cached(data, redis.port)

        async with two_ranks(tmp_path, tiny_model_dir, change) as two:
            for rank in (0, 1):
                assert await two.ask(rank, "cached") == 200
                # LiteLLM stores an answer after its end.
                await asyncio.sleep(0.5)
            assert len(two.provider.requests) == 1
            assert await two.have_one_limit()
    assert "counted in Redis for all ranks" in log_of(tmp_path)


async def test_limits_of_litellms_models_are_counted_in_the_redis_of_the_journal(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(litellm.VARIABLE, litellm.SECRET)
    login = "rank on >secret ~any-agent:* &any-agent:* +@all"
    with RedisServer(tmp_path / "redis", "--user", *login.split()) as redis:
        url = redis.url.replace("//", "//rank:secret@")
        async with two_ranks(tmp_path, tiny_model_dir, limited, journal=url) as two:
            assert await two.have_one_limit()
            with redis.client() as client:
                counters = list(client.scan_iter("any-agent:*:litellm:*"))
    assert "counted in Redis for all ranks" in log_of(tmp_path)
    assert counters
    assert "secret" not in log_of(tmp_path)
