"""Frozen models of a real process, with LiteLLM's app in it: killed, started again, and its log."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.proxy_ext.frozen.test_call import holding
from tests.proxy_ext.test_process import run
from tests.support.fake_provider import Provider
from tests.support.frozen import BODIES, SECRET, VARIABLE, chat_body, models, refused
from tests.support.ports import own_port
from tests.support.proxy import HELLO
from tests.support.real_parts import in_a_thread, proxy_process, write_config
from tests.support.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.service

LIMIT = 60.0


class Life:
    """One process, and how it is asked."""

    def __init__(self, http: httpx.AsyncClient, kill: Any) -> None:
        self.http = http
        self.kill = kill

    async def post(self, path: str, body: dict[str, Any], key: str = "") -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return await self.http.post(path, json=body, headers=headers)


@asynccontextmanager
async def life(config: Path, engine_url: str) -> AsyncIterator[Life]:
    # In a thread: the engine and the provider that it reaches are of this loop.
    rank = in_a_thread(proxy_process(config, engine_url, own_port()))
    async with rank as (child, url), httpx.AsyncClient(base_url=url, timeout=LIMIT) as http:
        yield Life(http, child.kill)


async def test_a_killed_service_keeps_frozen_spending_and_leaks_no_key(
    tiny_model_dir: Path,
    tmp_path: Path,
    engine: ScriptedEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, SECRET)
    provider = Provider()
    async with provider.serve() as url:
        frozen = {"model_list": models(url), "session_usd": 1.8, "timeout": 30.0}
        config = write_config(tmp_path, tiny_model_dir, frozen=frozen, log_level="debug")
        async with life(config, engine.url) as first:
            session = (await first.post("/rl/v1/start_session", {"mode": "eval"})).json()
            key = session["api_key"]
            for path, body in BODIES.items():
                response = await first.post(path, {"model": "judge", **body}, key)
                assert response.status_code == 200, response.text
            provider.fail("401")
            error = await first.post("/v1/chat/completions", chat_body(), key)
            assert SECRET not in refused(error, 502, "provider_error")
            policy = await first.post(
                "/v1/chat/completions", chat_body(model="any", max_tokens=4), key
            )
            assert policy.status_code == 200, policy.text
            first.kill()
        async with life(config, engine.url) as second:
            fifth = await second.post("/v1/chat/completions", chat_body(stream=True), key)
            assert fifth.text.endswith("data: [DONE]\n\n")
            over = await second.post("/v1/chat/completions", chat_body(), key)
            assert "1.85 USD" in refused(over, 402, "spend_cap_exceeded")
            said = policy.json()["choices"][0]["message"]
            talk = [*HELLO, said, {"role": "user", "content": "Another."}]
            further = {"model": "any", "messages": talk, "max_tokens": 4}
            assert (await second.post("/v1/chat/completions", further, key)).is_success
            info = (await second.http.get(f"/rl/v1/sessions/{session['session_id']}")).json()
            assert info["interactions"] == 2
            assert (await second.post("/rl/v1/finalize", {"final_reward": 1.0}, key)).is_success
    log = (tmp_path / "proxy.log").read_text()
    assert "the provider of judge failed with 401" in log
    assert not holding(tmp_path, SECRET)


def test_a_service_without_its_provider_key_does_not_start(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    frozen = {"model_list": models("http://127.0.0.1:1")}
    ended = run(write_config(tmp_path, tiny_model_dir, frozen=frozen), "--port", "0")
    assert ended.returncode == 2
    assert VARIABLE in ended.stderr
    assert "Traceback" not in ended.stderr
