"""Two ranks of one service with an operator's LiteLLM configuration and one Redis server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
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


class Pair:
    def __init__(self, ranks: list[httpx.AsyncClient], provider: Provider, log: Path) -> None:
        self.ranks = ranks
        self.provider = provider
        self.log = log
        self._keys: dict[int, dict[str, str]] = {}

    async def ask(self, rank: int, model: str, text: str = "Hello.") -> httpx.Response:
        body = {"model": model, "messages": [{"role": "user", "content": text}]}
        if rank not in self._keys:
            self._keys[rank] = await litellm.session(self.ranks[rank])
        return await self.ranks[rank].post(
            "/v1/chat/completions", json=body, headers=self._keys[rank]
        )

    async def statuses(self, rank: int, model: str, calls: int) -> list[int]:
        return [(await self.ask(rank, model)).status_code for _ in range(calls)]


@asynccontextmanager
async def running(
    folder: Path, model: Path, patch: pytest.MonkeyPatch, redis: int
) -> AsyncIterator[Pair]:
    """Two ranks that share the server at the port ``redis``."""
    patch.setenv(litellm.VARIABLE, litellm.SECRET)
    provider = Provider()
    engine = ScriptedEngine(decode=load_chat_format(str(model)).decode)
    async with provider.serve() as url, engine.serve(), AsyncExitStack() as stack:
        data = litellm.examples(url)
        planner = data["model_list"][0]["litellm_params"]
        cached = {**planner, "cache": {"use-cache": True}}
        data["model_list"] += [
            {"model_name": "limited", "litellm_params": {**planner, "rpm": LIMIT}},
            {"model_name": "cached", "litellm_params": cached},
        ]
        where: dict[str, Any] = {"host": "127.0.0.1", "port": redis}
        settings, router = data["litellm_settings"], data["router_settings"]
        settings |= {"cache": True}
        settings["cache_params"] = {"type": "redis", **where, "mode": "default_off"}
        del settings["callbacks"], settings["fallbacks"]
        router["optional_pre_call_checks"] = ["enforce_model_rate_limits"]
        router |= {"redis_host": where["host"], "redis_port": redis}
        path = litellm.write_litellm(folder, data)
        ranks = [
            await stack.enter_async_context(
                litellm.rank(path, model, engine.url, number=number, ranks=2)
            )
            for number in range(2)
        ]
        yield Pair(ranks, provider, folder / "ours" / "proxy.log")


async def a_minute_with_room() -> None:
    """LiteLLM counts by the minute of the clock."""
    if (left := 60 - time.time() % 60) < 20:
        await asyncio.sleep(left)


async def test_limits_and_cache(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RedisServer(tmp_path / "redis") as redis:
        async with running(tmp_path, tiny_model_dir, monkeypatch, redis.port) as pair:
            for rank in (0, 1):
                answer = await pair.ask(rank, "cached", "Remember this.")
                assert answer.status_code == 200, answer.text
                # LiteLLM stores an answer after its end.
                await asyncio.sleep(0.5)
            assert len(pair.provider.requests) == 1
            await a_minute_with_room()
            # One rank may use the whole limit, and the other has nothing left.
            assert await pair.statuses(0, "limited", LIMIT) == [200] * LIMIT
            assert await pair.statuses(1, "limited", LIMIT) == [429] * LIMIT
            log = pair.log.read_text()
    assert "are shared by Redis" in log and "has no Redis" not in log
