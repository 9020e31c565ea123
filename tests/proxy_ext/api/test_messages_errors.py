"""Errors at `/v1/messages`, each in Anthropic's shape, whichever part answers it."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import httpx
import pytest

from any_agent.chat import ChatFormat
from tests.proxy_ext.api.test_chat import say
from tests.support.errors import fails_with
from tests.support.messages import PATH, TOOLS, agent_of, post, refused
from tests.support.proxy import HELLO, Proxy, until
from tests.support.proxy_fixtures import Start
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_run import FaultKind

COUNT = f"{PATH}/count_tokens"
INVALID = "invalid_request_error"
TALK: list[Any] = [*HELLO]
BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": ...}, "invalid_request"),
    ({"messages": [7]}, "invalid_request"),
    ({"tools": TOOLS * 2}, "invalid_request"),
    ({"mcp_servers": [{}]}, "unsupported_parameter"),
    ({"messages": [{"role": "user", "content": "word " * 50_000}]}, "context_length_exceeded"),
]


FAILURES: list[tuple[FaultKind, int, str, str]] = [
    ("disagree", 500, "api_error", "engine_mismatch"),
    ("garbage", 503, "overloaded_error", "engine_unavailable"),
]


async def test_bad_requests_are_refused_by_calls_and_counts_alike(proxy: Proxy) -> None:
    session = await proxy.open()
    key = session["api_key"]
    for fields, code in BAD:
        for stream in (False, True):
            refused(await post(proxy, key, **fields, stream=stream), 400, INVALID, code)
        if code != "context_length_exceeded" and "max_tokens" not in fields:
            refused(await post(proxy, key, COUNT, **fields), 400, INVALID, code)
    for path in (PATH, COUNT):
        no_json = await proxy.http.post(path, content=b"{", headers={"x-api-key": key})
        refused(no_json, 400, INVALID, "invalid_json")
        assert no_json.headers["x-should-retry"] == "false"
    assert await proxy.recorded(session["session_id"]) == []


async def test_refusals_before_the_routes_have_the_shape_of_anthropic(start: Start) -> None:
    proxy = await start("server.admin_key=sk-admin-0123456789", "server.max_body_bytes=100000")
    await proxy.admit(5)
    key = {"x-api-key": (await proxy.open())["api_key"]}
    nobody, large = {"x-api-key": "sk-nothing"}, {"messages": "x" * 200_000}
    async with httpx.AsyncClient(base_url=proxy.url) as http:
        for path in (PATH, "/messages", COUNT):
            for headers in (nobody, {}):
                response = await http.post(path, json={}, headers=headers)
                refused(response, 401, "authentication_error", "invalid_api_key")
            response = await http.post(path, json=large, headers=key)
            refused(response, 413, "request_too_large", "payload_too_large")
            response = await http.get(path, headers=key)
            assert (response.status_code, response.json()["type"]) == (405, "error")
        response = await http.post("/sk-v1.0.abc.def/v1/messages", json={})
        refused(response, 401, "authentication_error", "invalid_api_key")
        # As agents have it that give Anthropic's client OpenAI's base URL.
        for path in ("/v1/messages/batches", "/v1/v1/messages"):
            response = await http.post(path, headers=key)
            refused(response, 404, "not_found_error", "not_found")
        # Behind a session's key that is what an agent's base URL makes, and works.
        response = await http.post(f"/{key['x-api-key']}/v1/v1/messages", headers=key)
        refused(response, 400, INVALID, "invalid_json")
        many = {**key, "x-more": "y" * 40_000}
        refused(await http.post(PATH, headers=many), 413, "request_too_large", "payload_too_large")


async def test_an_unknown_or_closed_session_is_refused_in_anthropics_shape(proxy: Proxy) -> None:
    session = await proxy.finished_session()
    headers = {"x-any-agent-session": "ses-0-0123456789abcdef"}
    for path in (PATH, COUNT):
        body = {"max_tokens": 5, "messages": HELLO}
        response = await proxy.http.post(path, json=body, headers=headers)
        refused(response, 404, "not_found_error", "session_not_found")
        response = await post(proxy, session["api_key"], path)
        refused(response, 410, INVALID, "session_closed")


async def test_a_call_above_the_limit_is_refused_in_anthropics_shape(
    start: Start, engine: ScriptedEngine
) -> None:
    proxy = await start("server.max_inflight_calls=1", admit=5)
    first, second = [await proxy.open() for _ in range(2)]
    go_on = engine.hold(0)
    waiting = asyncio.create_task(post(proxy, first["api_key"]))
    await until(lambda: engine.running, "the call")
    for path in (PATH, COUNT):
        response = await post(proxy, second["api_key"], path)
        refused(response, 429, "rate_limit_error", "too_many_calls")
        assert int(response.headers["Retry-After"]) >= 1
        assert "x-should-retry" not in response.headers
    go_on.set()
    assert (await waiting).status_code == 200


async def test_a_failure_of_the_engine_is_told_in_anthropics_shape(
    proxy: Proxy, engine: ScriptedEngine
) -> None:
    key = (await proxy.open())["api_key"]
    for kind, status, type, code in FAILURES:
        engine.fail(kind)
        refused(await post(proxy, key), status, type, code)
        engine.fail(kind, after=2)
        async with agent_of(proxy, key) as agent:
            with fails_with(anthropic.APIStatusError, type=type, error_code=code):
                async with agent.messages.stream(model="m", max_tokens=8, messages=TALK) as stream:
                    await stream.until_done()


async def test_disabling_parallel_tools_is_refused_where_the_template_cannot(
    proxy: Proxy, chat: ChatFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await proxy.open()
    monkeypatch.setattr(type(chat), "one_call_stop_ids", lambda _: None)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    response = await post(proxy, session["api_key"], tools=TOOLS, tool_choice=choice)
    message = refused(response, 400, INVALID, "unsupported_parameter")
    assert message.startswith("tool_choice.disable_parallel_tool_use is not supported")
    assert response.json()["error"]["details"]["param"] == "tool_choice"


async def test_a_retry_is_the_call_that_it_repeats(
    proxy: Proxy, engine: ScriptedEngine, chat: ChatFormat
) -> None:
    session = await proxy.open()
    say(engine, chat, "one two three")
    go_on = engine.hold(2)
    agent = anthropic.AsyncAnthropic(
        base_url=proxy.url, api_key=session["api_key"], max_retries=8, timeout=1.0
    )
    async with agent:
        asking = asyncio.create_task(agent.messages.create(model="m", max_tokens=50, messages=TALK))
        await until(lambda: proxy.service.calls.stats.retries["joined"], "the retry")
        go_on.set()
        answer = await asking
    (block,) = answer.content
    assert block.type == "text" and block.text == "one two three"
    assert [i.id for i in await proxy.recorded(session["session_id"])] == [answer.id]
    assert len(engine.requests) == 1
