"""Two ranks of one service with an operator's LiteLLM configuration and one Redis server."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from any_agent.chat import load_chat_format
from tests.support import litellm
from tests.support.fake_provider import Provider
from tests.support.redis_server import RedisServer
from tests.support.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.service

LIMIT = 4
"""Calls a minute of the limited model."""


def shared(data: dict[str, Any], port: int) -> None:
    """Let LiteLLM's examples share the Redis at a port."""
    planner = data["model_list"][0]["litellm_params"]
    cached = {**planner, "cache": {"use-cache": True}}
    data["model_list"] += [
        {"model_name": "limited", "litellm_params": {**planner, "rpm": LIMIT}},
        {"model_name": "cached", "litellm_params": cached},
    ]
    settings, router = data["litellm_settings"], data["router_settings"]
    where = {"host": "127.0.0.1", "port": port}
    settings |= {"cache": True, "cache_params": {"type": "redis", **where, "mode": "default_off"}}
    del settings["callbacks"], settings["fallbacks"]
    router["optional_pre_call_checks"] = ["enforce_model_rate_limits"]
    router |= {"redis_host": where["host"], "redis_port": port}


async def test_ranks_share_limits_and_cache(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(litellm.VARIABLE, litellm.SECRET)
    provider = Provider()
    engine = ScriptedEngine(decode=load_chat_format(str(tiny_model_dir)).decode)
    with RedisServer(tmp_path / "redis") as redis:
        async with provider.serve() as url, engine.serve(), AsyncExitStack() as stack:
            data = litellm.examples(url)
            shared(data, redis.port)
            path, ranks = litellm.write_litellm(tmp_path, data), []
            for number in range(2):
                rank = litellm.rank(path, tiny_model_dir, engine.url, number=number, ranks=2)
                http = await stack.enter_async_context(rank)
                ranks.append((http, await litellm.session(http)))

            async def ask(rank: int, model: str) -> int:
                http, key = ranks[rank]
                body = {"model": model, "messages": [{"role": "user", "content": "Hello."}]}
                answer = await http.post("/v1/chat/completions", json=body, headers=key)
                return answer.status_code

            for rank in (0, 1):
                assert await ask(rank, "cached") == 200
                # LiteLLM stores an answer after its end.
                await asyncio.sleep(0.5)
            assert len(provider.requests) == 1
            # LiteLLM counts by the minute of the clock.
            if (left := 60 - time.time() % 60) < 20:
                await asyncio.sleep(left)
            # One rank may use the whole limit, and the other has nothing left.
            assert [await ask(0, "limited") for _ in range(LIMIT)] == [200] * LIMIT
            assert [await ask(1, "limited") for _ in range(LIMIT)] == [429] * LIMIT
            log = (tmp_path / "ours" / "proxy.log").read_text()
    assert "are shared by Redis" in log and "has no Redis" not in log
