"""Answers of `/v1/responses` told again, deleted, named; and what is refused, in OpenAI's shape."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from any_agent.chat import ChatFormat
from any_agent.types import Continuation
from tests.proxy_ext.api.test_chat import say
from tests.support.openai_agent import (
    CALL,
    PATH,
    TOOLS,
    agent_of,
    create,
    output_of,
    post,
    refused,
    said_back,
)
from tests.support.proxy import HELLO, Proxy
from tests.support.proxy_fixtures import Restart, Start
from tests.support.scripted_engine import ScriptedEngine
from tests.support.sessions import finalize


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


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_of_a_groups_function_has_its_namespace_wherever_it_is_told(
    restart: Restart, engine: ScriptedEngine, chat: ChatFormat, stream: bool
) -> None:
    proxy = await restart()
    session = await proxy.open()
    key = session["api_key"]
    (find,) = TOOLS
    asked: dict[str, Any] = {
        "instructions": "Be brief.",
        "tools": [{"type": "namespace", "name": "web", "tools": [find]}, find],
    }
    grouped = CALL.replace('"find"', '"web__find"')
    assert grouped != CALL
    say(engine, chat, f"{grouped}\n{CALL}")
    first = await create(proxy, key, stream=stream, **asked)
    names = [(call.name, call.namespace) for call in first.output]
    assert names == [("find", "web"), ("find", None)]
    again = await restart()
    again.http.headers["authorization"] = f"Bearer {key}"
    told = (await again.http.get(f"{PATH}/{first.id}")).json()
    assert told["output"] == [item.to_dict() for item in first.output]
    assert [tool["type"] for tool in told["tools"]] == ["namespace", "function"]
    say(engine, chat, "Done.")
    outputs = [output_of(call, "7") for call in first.output]
    second = await create(
        again, key, stream=stream, input=[*HELLO, *said_back(first), *outputs], **asked
    )
    _, after = await again.recorded(session["session_id"])
    assert after.parent_id == first.id and after.continuation is Continuation.EXACT
    items = (await again.http.get(f"{PATH}/{second.id}/input_items")).json()["data"]
    calls = [item for item in items if item["type"] == "function_call"]
    assert {(call["name"], call.get("namespace")) for call in calls} == set(names)


async def test_a_stored_response_lists_the_items_that_it_answered(
    proxy: Proxy, engine: ScriptedEngine, chat: ChatFormat
) -> None:
    session = await proxy.open()
    key = session["api_key"]
    say(engine, chat, CALL)
    first = await create(proxy, key, instructions="Be brief.", tools=TOOLS)
    more = [output_of(first.output[0], "7"), {"role": "user", "content": "And?"}]
    asked: dict[str, Any] = {"instructions": "Be brief.", "tools": TOOLS, "max_output_tokens": 2}
    second = await create(proxy, key, input=more, previous_response_id=first.id, **asked)
    async with agent_of(proxy, key) as agent:
        page = await agent.responses.input_items.list(second.id, order="asc", limit=3)
        items = [item async for item in page]
        kinds = [item.type for item in items]
        assert kinds == ["message", "function_call", "function_call_output", "message"]
        newest = await agent.responses.input_items.list(second.id)
        assert [item.id for item in newest.data] == [item.id for item in reversed(items)]
        with pytest.raises(openai.BadRequestError):
            await agent.responses.input_items.list(second.id, after="msg_x")
        with pytest.raises(openai.BadRequestError):
            await agent.get(f"/responses/{first.id}?stream=true", cast_to=object)


async def test_a_page_has_few_items(proxy: Proxy) -> None:
    key = (await proxy.open())["api_key"]
    id = (await post(proxy, key, input=[{"role": "user", "content": "a"}] * 130)).json()["id"]
    proxy.http.headers["authorization"] = f"Bearer {key}"
    path = f"{PATH}/{id}/input_items"
    for limit in ("0", "101", "000000001999", "1" + "9" * 5000, "0100", "-1", "1.0", "２", ""):
        answer = await proxy.http.get(path, params={"limit": limit})
        refused(answer, 400, "invalid_request", "limit")
    page = await proxy.http.get(path, params={"limit": "100"})
    assert len(page.json()["data"]) == 100


async def test_a_deleted_response_stays_gone_after_a_restart(restart: Restart) -> None:
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
    await finalize(proxy, session, final_reward=1)
    (trajectory,) = await proxy.lease()
    assert [i.id for i in trajectory.interactions][:2] == [first["id"], second["id"]]
    closed = await proxy.http.delete(f"{PATH}/{second['id']}", headers={"x-api-key": key})
    refused(closed, 410, "session_closed", None)


async def test_another_sessions_answers_are_not_there(proxy: Proxy) -> None:
    mine, other = [(await proxy.open())["api_key"] for _ in range(2)]
    id = (await post(proxy, other)).json()["id"]
    chatted = (await proxy.complete(mine))["id"]
    for previous in (id, "resp_x", ""):
        response = await post(proxy, mine, previous_response_id=previous)
        refused(response, 404, "previous_response_not_found", "previous_response_id")
    response = await post(proxy, mine, previous_response_id="x" * 600)
    refused(response, 400, "invalid_request", "previous_response_id")
    item = {"type": "item_reference", "id": f"msg_{id.removeprefix('resp_')}_0"}
    refused(await post(proxy, mine, input=[item]), 404, "item_not_found", "input[0]")
    headers = {"authorization": f"Bearer {mine}"}
    for known in (id, "resp_x", chatted):
        for path in (known, f"{known}/input_items"):
            response = await proxy.http.get(f"{PATH}/{path}", headers=headers)
            refused(response, 404, "response_not_found", "response_id")
        response = await proxy.http.delete(f"{PATH}/{known}", headers=headers)
        refused(response, 404, "response_not_found", "response_id")


async def test_without_kept_texts_an_earlier_response_is_refused(start: Start) -> None:
    proxy = await start("sessions.store_content=false", admit=5)
    key = (await proxy.open())["api_key"]
    id = (await post(proxy, key)).json()["id"]
    response = await post(proxy, key, previous_response_id=id)
    assert "whole conversation" in refused(
        response, 400, "content_not_stored", "previous_response_id"
    )
    response = await proxy.http.get(f"{PATH}/{id}", headers={"x-api-key": key})
    refused(response, 400, "content_not_stored", "response_id")


async def test_a_refused_request_is_not_recorded(proxy: Proxy) -> None:
    session = await proxy.open()
    file_search = {"tools": TOOLS, "tool_choice": {"type": "file_search"}}
    for fields, code, param in (
        ({"input": [{"type": "computer_call_output"}]}, "unsupported_parameter", "input[0]"),
        ({"input": [{"role": "user", "content": [3]}]}, "invalid_request", "input[0].content[0]"),
        (file_search, "unsupported_parameter", "tool_choice"),
        ({"background": True}, "unsupported_parameter", "background"),
        ({"max_output_tokens": 0}, "invalid_request", "max_output_tokens"),
        ({"input": "many words " * 3000}, "context_length_exceeded", "input"),
    ):
        refused(await post(proxy, session["api_key"], **fields), 400, code, param)
    assert not await proxy.recorded(session["session_id"])
