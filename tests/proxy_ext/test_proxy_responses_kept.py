"""Answers of `/v1/responses` told again, deleted, named; and what is refused, in OpenAI's shape."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from any_agent.chat import ChatFormat
from tests.fakes.scripted_engine import ScriptedEngine
from tests.proxy_ext.conftest import Restart, Start
from tests.proxy_ext.openai_agent import (
    CALL,
    PATH,
    TOOLS,
    agent_of,
    create,
    output_of,
    post,
    refused,
)
from tests.proxy_ext.proxy_lab import Proxy
from tests.proxy_ext.test_proxy_chat import say


async def test_an_answer_is_told_again_as_it_was(
    restart: Restart, engine: ScriptedEngine, chat: ChatFormat
) -> None:
    proxy = await restart()
    session = await proxy.open()
    key = session["api_key"]
    asked: dict[str, Any] = {
        "instructions": "Be brief.",
        "tools": TOOLS,
        "tool_choice": "auto",
        "metadata": {"a": "b"},
        "reasoning": {"effort": None, "summary": "auto"},
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 1,
        "temperature": 0.5,
        "store": False,
        "user": "somebody",
    }
    bodies = []
    for more in ({}, {"stop": "four"}, {"max_output_tokens": 3}):
        say(engine, chat, f"one two three four {CALL}")
        response = await post(proxy, key, **{**asked, "max_output_tokens": 100, **more})
        assert response.status_code == 200, response.text
        bodies.append(response.json())
    bodies.append((await post(proxy, key)).json())
    again = await restart()
    again.http.headers["authorization"] = f"Bearer {key}"
    for body in bodies:
        told = await again.http.get(f"{PATH}/{body['id']}")
        assert told.json() == body


async def test_what_it_was_an_answer_to(
    proxy: Proxy, engine: ScriptedEngine, chat: ChatFormat
) -> None:
    session = await proxy.open()
    key = session["api_key"]
    say(engine, chat, CALL)
    first = await create(proxy, key, instructions="Be brief.", tools=TOOLS)
    second = await create(
        proxy,
        key,
        instructions="Be brief.",
        tools=TOOLS,
        previous_response_id=first.id,
        input=[output_of(first.output[0], "7"), {"role": "user", "content": "And?"}],
        max_output_tokens=2,
    )
    async with agent_of(proxy, key) as agent:
        page = await agent.responses.input_items.list(second.id, order="asc", limit=3)
        items = [item async for item in page]
        assert [item.type for item in items] == [
            "message",
            "function_call",
            "function_call_output",
            "message",
        ]
        newest = await agent.responses.input_items.list(second.id)
        assert [item.id for item in newest.data] == [item.id for item in reversed(items)]
        with pytest.raises(openai.BadRequestError):
            await agent.responses.input_items.list(second.id, after="msg_x")
        with pytest.raises(openai.BadRequestError):
            await agent.responses.input_items.list(second.id, limit=0)
        with pytest.raises(openai.BadRequestError):
            await agent.get(f"/responses/{first.id}?stream=true", cast_to=object)


async def test_a_deleted_answer(restart: Restart) -> None:
    proxy = await restart()
    session = await proxy.open()
    key = session["api_key"]
    first = (await post(proxy, key)).json()
    second = (await post(proxy, key, previous_response_id=first["id"])).json()
    async with agent_of(proxy, key) as agent:
        await agent.responses.delete(first["id"])
        with pytest.raises(openai.NotFoundError):
            await agent.responses.delete(first["id"])
    proxy = await restart()
    async with agent_of(proxy, key) as agent:
        with pytest.raises(openai.NotFoundError):
            await agent.responses.retrieve(first["id"])
        # What went on from it is there.
        assert (await agent.responses.retrieve(second["id"])).id == second["id"]
    again = await post(proxy, key, previous_response_id=first["id"])
    refused(again, 404, "previous_response_not_found", "previous_response_id")
    assert (await post(proxy, key, previous_response_id=second["id"])).status_code == 200
    # It is trained on all the same.
    response = await proxy.post(
        "/rl/v1/finalize", {"final_reward": 1, "session_id": session["session_id"]}, key
    )
    assert response.status_code == 200, response.text
    (trajectory,) = await proxy.lease()
    assert [i.id for i in trajectory.interactions][:2] == [first["id"], second["id"]]
    closed = await proxy.http.delete(f"{PATH}/{second['id']}", headers={"x-api-key": key})
    refused(closed, 410, "session_closed", None)


async def test_another_sessions_answers_are_not_there(proxy: Proxy) -> None:
    mine, other = [(await proxy.open())["api_key"] for _ in range(2)]
    id = (await post(proxy, other)).json()["id"]
    chatted = (await proxy.complete(mine))["id"]
    for previous in (id, "resp_x", "", "x" * 600):
        response = await post(proxy, mine, previous_response_id=previous)
        if len(previous) > 512:
            refused(response, 400, "invalid_request", "previous_response_id")
        else:
            refused(response, 404, "previous_response_not_found", "previous_response_id")
    item = {"type": "item_reference", "id": f"msg_{id.removeprefix('resp_')}_0"}
    refused(await post(proxy, mine, input=[item]), 404, "item_not_found", "input[0]")
    headers = {"authorization": f"Bearer {mine}"}
    for known in (id, "resp_x", chatted):
        for path in (known, f"{known}/input_items"):
            response = await proxy.http.get(f"{PATH}/{path}", headers=headers)
            refused(response, 404, "response_not_found", "response_id")
        response = await proxy.http.delete(f"{PATH}/{known}", headers=headers)
        refused(response, 404, "response_not_found", "response_id")


async def test_without_texts_nothing_is_named(start: Start) -> None:
    proxy = await start("sessions.store_content=false")
    await proxy.admit(5)
    key = (await proxy.open())["api_key"]
    id = (await post(proxy, key)).json()["id"]
    response = await post(proxy, key, previous_response_id=id)
    assert "whole conversation" in refused(
        response, 400, "content_not_stored", "previous_response_id"
    )
    response = await proxy.http.get(f"{PATH}/{id}", headers={"x-api-key": key})
    refused(response, 400, "content_not_stored", "response_id")


WEB = {"type": "web_search"}
UNKNOWN = "unsupported_parameter"
WRONG = "invalid_request"


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"input": ...}, WRONG, "input"),
        ({"input": []}, WRONG, "input"),
        ({"input": 3}, WRONG, "input"),
        ({"input": [{"type": "computer_call_output"}]}, UNKNOWN, "input[0]"),
        ({"input": [{"role": "user", "content": [3]}]}, WRONG, "input[0].content[0]"),
        ({"tools": [WEB]}, UNKNOWN, "tools"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, UNKNOWN, "tools"),
        ({"tools": [{"type": "function"}]}, WRONG, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "file_search"}}, UNKNOWN, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "g"}}, WRONG, "tool_choice"),
        ({"background": True}, UNKNOWN, "background"),
        ({"conversation": "conv_1"}, UNKNOWN, "conversation"),
        ({"prompt": {"id": "p"}}, UNKNOWN, "prompt"),
        ({"truncation": "auto"}, UNKNOWN, "truncation"),
        ({"messages": []}, UNKNOWN, "messages"),
        ({"n": 2}, UNKNOWN, "n"),
        ({"include": ["everything"]}, UNKNOWN, "include"),
        ({"text": {"format": {"type": "xml"}}}, UNKNOWN, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, WRONG, "text.format"),
        ({"text": {"format": {"type": "json_object"}}, "tools": TOOLS}, WRONG, "text.format"),
        ({"max_output_tokens": 0}, WRONG, "max_output_tokens"),
        ({"instructions": ["x"]}, WRONG, "instructions"),
        ({"stream": "yes"}, WRONG, "stream"),
        ({"input": "many words " * 3000}, "context_length_exceeded", "input"),
    ],
)
async def test_refusals(proxy: Proxy, fields: dict[str, Any], code: str, param: str) -> None:
    session = await proxy.open()
    response = await post(proxy, session["api_key"], **fields)
    refused(response, 400, code, param)
    assert not await proxy.recorded(session["session_id"])
