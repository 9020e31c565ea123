"""`/v1/responses` by OpenAI's SDK: streams, paths, what goes on from an answer."""

from __future__ import annotations

import itertools
from typing import Any

from any_agent.chat import ChatFormat
from any_agent.types import Continuation
from tests.proxy_ext.api.test_chat import say
from tests.support.openai_agent import (
    CALL,
    TOOLS,
    create,
    post,
)
from tests.support.proxy import Proxy
from tests.support.scripted_engine import ScriptedEngine


async def exact(proxy: Proxy, session_id: str) -> list[Any]:
    """A session's interactions, each of which continues the one before."""
    recorded = await proxy.recorded(session_id)
    for before, after in itertools.pairwise(recorded):
        assert after.parent_id == before.id, after.branch_reason
        assert after.continuation is Continuation.EXACT
    return recorded


async def test_a_stream_comes_to_the_whole_answer_with_its_log_probabilities(
    proxy: Proxy, engine: ScriptedEngine, chat: ChatFormat
) -> None:
    key = (await proxy.open())["api_key"]
    logprobs: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    for text in (f"First.\n{CALL}", f"{CALL} then text"):
        told = []
        for stream in (False, True):
            say(engine, chat, text)
            answer = await create(proxy, key, stream=stream, tools=TOOLS, **logprobs)
            items = [item.model_dump(exclude={"id", "call_id"}) for item in answer.output]
            told.append((answer.status, answer.usage, items))
        assert told[0] == told[1], text


async def test_responses_are_served_at_every_path_and_with_every_kind_of_key(proxy: Proxy) -> None:
    session = await proxy.open()
    key = session["api_key"]
    for path in ("/v1/responses", "/responses"):
        assert (await post(proxy, key, path)).status_code == 200
    for path in (f"/{key}/v1/responses", f"/{key}/responses"):
        response = await post(proxy, None, path)
        assert response.status_code == 200
        id = response.json()["id"]
        assert response.headers["x-any-agent-interaction"] == id
        for told in (f"{path}/{id}", f"{path}/{id}/input_items"):
            assert (await proxy.http.get(told)).status_code == 200
    response = await proxy.http.post(
        "/v1/responses", json={"input": "x"}, headers={"x-api-key": key}
    )
    assert response.status_code == 200


async def test_without_an_input_it_goes_on_from_the_response(proxy: Proxy) -> None:
    limit = {"max_output_tokens": 2}
    for more in ({}, {"input": []}, {"input": ""}):
        session = await proxy.open()
        key = session["api_key"]
        refused = await proxy.post("/v1/responses", {"input": []}, key)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
        first = (await proxy.post("/v1/responses", {"input": "Go.", **limit}, key)).json()
        body = {"previous_response_id": first["id"], **limit, **more}
        second = await proxy.post("/v1/responses", body, key)
        assert second.status_code == 200, second.text
        one, two = await proxy.recorded(session["session_id"])
        assert (one.id, two.id) == (first["id"], second.json()["id"])
        assert [m["role"] for m in two.message_delta] == ["user", "assistant"]


async def test_a_client_that_asks_for_a_websocket_hears_once_that_there_is_none(
    proxy: Proxy,
) -> None:
    key = (await proxy.open())["api_key"]
    asks = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    asks["Sec-WebSocket-Key"] = "dGhlIHNhbXBsZSBub25jZQ=="
    for prefix in ("", f"/{key}"):
        path = f"{prefix}/v1/responses"
        answer = await proxy.http.get(path, headers={"x-api-key": key, **asks})
        assert (answer.status_code, answer.json()["error"]["code"]) == (426, "no_websocket")
        assert (await proxy.http.get(path, headers={"x-api-key": key})).status_code == 405
