"""Kinds of engines by name: the one of docs/how-to/extend.md behind a live proxy."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from any_agent.chat import ChatFormat
from any_agent.engine import SGLangEngine, kinds, open_engine, register_engine
from any_agent.errors import ConfigError
from any_agent.types import GenerationHyperparameters, ModelRequest
from tests.support.errors import fails_with
from tests.support.extend_page import run_code_of
from tests.support.proxy import Proxy, until
from tests.support.proxy_fixtures import Start, chat, engine, start

__all__ = ["chat", "engine", "start"]


@pytest.fixture
def complete(monkeypatch: pytest.MonkeyPatch) -> type:
    """The document's kind of engine, registered for one test."""
    monkeypatch.setattr(kinds, "KINDS", copy.deepcopy(kinds.KINDS))
    found: type = run_code_of("Add an engine")["CompleteEngine"]
    return found


class CompleteServer:
    """An engine with the two routes of the document."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[dict[str, Any]] = []
        self.ids: list[int] = []
        self.hangs = False
        self.cancelled = 0

    async def info(self, _: web.Request) -> web.Response:
        return web.json_response({"model_path": "toy", "context_length": 512})

    async def complete(self, http: web.Request) -> web.Response:
        self.requests.append(await http.json())
        try:
            await asyncio.sleep(60 if self.hangs else 0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        logprobs = [-0.5 - k / 4 for k in range(len(self.ids))]
        answer = {"ids": self.ids, "logprobs": logprobs, "stop_reason": "stop"}
        return web.json_response(answer)


@pytest.fixture
async def server() -> AsyncIterator[CompleteServer]:
    server = CompleteServer()
    app = web.Application()
    app.router.add_get("/info", server.info)
    app.router.add_post("/complete", server.complete)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield server
    await runner.cleanup()


@pytest.fixture
async def proxy(complete: type, server: CompleteServer, start: Start) -> Proxy:
    settings = ("engine.kind=complete", f"engine.urls={server.url}", "server.ranks=1")
    return await start(*settings, engine_url=server.url)


async def test_a_call_is_answered_recorded_and_leased(
    complete: type, server: CompleteServer, proxy: Proxy, chat: ChatFormat
) -> None:
    server.ids = [*chat.encode("four", special=False), chat.stop_token_ids[0]]
    assert isinstance(proxy.service.engine, complete)
    await proxy.admit(9)
    session = await proxy.open()
    answer = await proxy.complete(session["api_key"])
    assert answer["choices"][0]["message"]["content"] == "four"
    (asked,) = server.requests
    assert asked["max_tokens"] == 8 and asked["temperature"] == 1.0
    (call,) = await proxy.recorded(session["session_id"])
    assert call.prompt_delta_ids.tolist() == asked["ids"]
    assert call.output_ids.tolist() == server.ids
    assert call.output_logprobs.tolist() == [-0.5 - k / 4 for k in range(len(server.ids))]
    assert call.output_versions.tolist() == [0] * len(server.ids)
    # A later turn goes on exactly, streamed too.
    turns = [
        {"role": "user", "content": "Say a number."},
        {"role": "assistant", "content": "four"},
        {"role": "user", "content": "Another one."},
    ]
    events, done = await proxy.stream(session["api_key"], turns)
    assert done and events
    assert server.requests[1]["ids"][: len(asked["ids"])] == asked["ids"]
    assert server.requests[1]["ids"][len(asked["ids"]) :][: len(server.ids)] == server.ids
    await proxy.post("/rl/v1/finalize", {"final_reward": 1}, session["api_key"])
    (trajectory,) = await proxy.lease()
    assert [each.continuation for each in trajectory.interactions] == ["root", "exact"]


async def test_a_parameter_that_an_engine_kind_lacks_is_refused_by_name(
    server: CompleteServer, proxy: Proxy
) -> None:
    key = (await proxy.open(mode="eval"))["api_key"]
    response = await proxy.call(key, presence_penalty=1)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "presence_penalty"
    assert not server.requests


async def test_cancelling_a_call_ends_its_request_at_the_engine(
    complete: type, server: CompleteServer
) -> None:
    server.hangs = True
    engine = open_engine("complete", server.url, decode=str)
    request = ModelRequest(input_ids=[1, 2], gconfig=GenerationHyperparameters())
    call = asyncio.ensure_future(engine.agenerate(request))
    await until(lambda: server.requests, "the request")
    call.cancel()
    await until(lambda: server.cancelled, "the end of the request")
    await engine.close()


async def test_a_kind_is_a_known_name_or_a_dotted_one(complete: type) -> None:
    with fails_with(ConfigError, "complete, embedded, sglang"):
        open_engine("vllm", "http://127.0.0.1:9", decode=str)
    dotted = "any_agent.engine.sglang.client.SGLangEngine"
    engine = open_engine(dotted, "http://127.0.0.1:9", decode=str)
    assert isinstance(engine, SGLangEngine)
    await engine.close()
    with fails_with(ValueError, "already"):
        register_engine("complete", SGLangEngine)
