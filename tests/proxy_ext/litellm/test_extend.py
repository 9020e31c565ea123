"""LiteLLM's own app in a script, extended by one call and served by the script itself."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.support import litellm
from tests.support.fake_provider import a_provider
from tests.support.ports import own_port
from tests.support.real_parts import await_url, in_a_thread, process, write_config
from tests.support.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.service


async def test_litellms_own_app_trains_after_one_call(
    tmp_path: Path, tiny_model_dir: Path, engine: ScriptedEngine
) -> None:
    async with a_provider() as provider:
        path = litellm.write_litellm(tmp_path, litellm.examples(provider.url))
        config = write_config(
            *(tmp_path, tiny_model_dir),
            litellm={"config": str(path)},
            server={"admin_key": litellm.ADMIN},
        )
        port, log, episode = own_port(), tmp_path / "script.log", tmp_path / "episode.json"
        variables = {
            "TEST_CALLBACK_LOG": str(tmp_path / "told.jsonl"),
            litellm.VARIABLE: litellm.SECRET,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        arguments = [str(config), engine.url, str(port), str(episode)]
        script = process(log, "tests.support.extended_app", *arguments, **variables)
        async with in_a_thread(script) as child:
            url = f"http://127.0.0.1:{port}"
            await asyncio.to_thread(await_url, f"{url}/healthz", child, log)
            async with litellm.client(url) as http:
                await litellm.ready(http)
                body = {"mode": "train", "wait": 60}
                opened = await http.post("/rl/v1/start_session", json=body)
                key = {"Authorization": f"Bearer {opened.json()['api_key']}"}
                for model in ("policy", "planner"):
                    await litellm.call(http, key, model)
                ended = await http.post("/rl/v1/finalize", json={"final_reward": 0.5}, headers=key)
                assert ended.status_code == 200, ended.text
                async with asyncio.timeout(60):
                    while not episode.exists():  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
                # LiteLLM's own routes for operators are an admin's alone.
                assert (await http.get("/spend/tags")).status_code != 404
                assert (await http.get("/spend/tags", headers=key)).status_code == 403
                listed = (await http.get("/v1/models")).json()["data"]
    told = json.loads(episode.read_text())
    assert (told["session_id"], told["final_reward"]) == (opened.json()["session_id"], 0.5)
    # The planner's call is recorded, and no part of what is trained on.
    (completion,) = told["completions"]
    assert completion and told["engine_answers"] > 0 and told["left_in_the_cache"] == []
    assert {"policy", "planner"} <= {model["id"] for model in listed}
    assert told["refusals"]["before the start"].startswith("ServiceUnavailable: ")
    assert "extended already" in told["refusals"]["a second time"]
    assert "proxy_server import app" in told["refusals"]["another app"]
