"""`/v1/responses` by OpenAI's SDK: answers, records, exact continuation, also across APIs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from any_agent.chat import ChatFormat
from any_agent.types import Continuation
from tests.proxy_ext.api.test_chat import say
from tests.support.openai_agent import (
    CALL,
    TOOLS,
    agent_of,
    create,
    output_of,
    post,
)
from tests.support.proxy import HELLO, Proxy
from tests.support.proxy_fixtures import Restart
from tests.support.scripted_engine import ScriptedEngine

BOTH = pytest.mark.parametrize("stream", [False, True])


async def exact(proxy: Proxy, session_id: str) -> list[Any]:
    """A session's interactions, each of which continues the one before."""
    recorded = await proxy.recorded(session_id)
    for before, after in itertools.pairwise(recorded):
        assert after.parent_id == before.id, after.branch_reason
        assert after.continuation is Continuation.EXACT
    return recorded


@BOTH
async def test_an_answer(
    proxy: Proxy, engine: ScriptedEngine, chat: ChatFormat, stream: bool
) -> None:
    session = await proxy.open()
    ids = say(engine, chat, "4 and 2")
    answer = await create(
        proxy, session["api_key"], stream=stream, instructions="Be brief.", metadata={"a": "b"}
    )
    assert (answer.object, answer.status, answer.model) == ("response", "completed", "gpt-5")
    assert (answer.error, answer.incomplete_details) == (None, None)
    assert (answer.instructions, answer.metadata) == ("Be brief.", {"a": "b"})
    (item,) = answer.output
    assert item.type == "message" and item.status == "completed"
    assert answer.output_text == "4 and 2"
    prompt = engine.requests[0]["input_ids"]
    assert prompt == chat.render([{"role": "system", "content": "Be brief."}, *HELLO], None)
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(prompt), len(ids))
    assert answer.usage.total_tokens == len(prompt) + len(ids)
    (interaction,) = await proxy.recorded(session["session_id"])
    assert interaction.id == answer.id and answer.id.startswith("resp_")
    assert interaction.prompt_delta_ids.tolist() == prompt
    assert interaction.output_ids.tolist() == ids
    assert interaction.trainable
    response = await proxy.post(
        "/rl/v1/set_reward", {"reward": 1, "interaction_id": answer.id}, session["api_key"]
    )
    assert response.status_code == 200, response.text


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


@BOTH
async def test_previous_answers_are_named_also_after_a_restart(
    restart: Restart, engine: ScriptedEngine, chat: ChatFormat, stream: bool
) -> None:
    proxy = await restart()
    session = await proxy.open()
    key = session["api_key"]
    say(engine, chat, CALL)
    first = await create(
        proxy, key, stream=stream, input="Find it.", tools=TOOLS, instructions="Old."
    )
    proxy = await restart()
    say(engine, chat, "It is there.")
    (call,) = first.output
    asked: dict[str, Any] = {"tools": TOOLS, "instructions": "Old."}
    second = await create(
        proxy,
        key,
        stream=stream,
        input=[output_of(call, "there")],
        previous_response_id=first.id,
        **asked,
    )
    assert second.previous_response_id == first.id
    say(engine, chat, "Bye.")
    await create(proxy, key, stream=stream, previous_response_id=second.id, **asked)
    one, two, three = await exact(proxy, session["session_id"])
    assert (one.id, two.id) == (first.id, second.id)
    assert two.message_delta == [
        {"role": "tool", "tool_call_id": one.output_message["tool_calls"][0]["id"]}
        | {"content": "there"}
    ]
    # Instructions are the request's own.
    say(engine, chat, "Hm.")
    await create(proxy, key, previous_response_id=three.id, tools=TOOLS)
    other = (await proxy.recorded(session["session_id"]))[-1]
    assert other.parent_id is None and other.branch_reason == "system_changed"
    assert [m["role"] for m in other.message_delta[:2]] == ["user", "assistant"]


async def test_the_events_of_a_stream(
    proxy: Proxy, engine: ScriptedEngine, chat: ChatFormat
) -> None:
    key = (await proxy.open())["api_key"]
    say(engine, chat, f"I look.\n{CALL}")
    asked: Any = {"model": "gpt-5", "input": "Find it.", "tools": TOOLS, "stream": True}
    async with agent_of(proxy, key) as agent:
        stream: Any = await agent.responses.create(**asked)
        events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    once = [kind for k, kind in enumerate(kinds) if kinds[k - 1 : k] != [kind]]
    assert once == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]


async def test_every_path_and_key(proxy: Proxy) -> None:
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


async def test_without_a_session(proxy: Proxy) -> None:
    """In inference alone: there is nothing to go on from."""
    response = await post(proxy, None)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "no_session"


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
