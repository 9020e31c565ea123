"""`/v1/messages` by Anthropic's SDK: thinking, paths, counted tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from any_agent.chat import ChatFormat, load_chat_format
from tests.proxy_ext.api.test_chat import say
from tests.proxy_ext.api.test_responses import exact
from tests.support.messages import CALL, TOOLS, agent_of, create, post, said_back
from tests.support.proxy import HELLO, Proxy, config_for, running_proxy
from tests.support.scripted_engine import ScriptedEngine

RESULT = {"type": "tool_result", "content": "it is there"}


LATER = {**TOOLS[0], "name": "later", "defer_loading": True}
USE = {"type": "tool_use", "id": "x", "name": "find", "input": {"text": "it"}}
REFERENCES = [{"type": "tool_reference", "tool_name": "later"}]
FOUND = [
    {"role": "assistant", "content": [USE]},
    {"role": "user", "content": [{**RESULT, "tool_use_id": "x", "content": REFERENCES}]},
]


@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_comes_back_as_reasoning(
    tmp_path: Path, tiny_model_dir: Path, engine: ScriptedEngine, stream: bool
) -> None:
    chat = load_chat_format(str(tiny_model_dir), enable_thinking=True)
    async with running_proxy(config_for(tmp_path), chat, engine_url=engine.url) as proxy:
        await proxy.admit(10)
        session = await proxy.open()
        key = session["api_key"]
        say(engine, chat, "<think>\nHm, hm.\n</think>\n\nSeven.")
        first = await create(proxy, key, stream=stream)
        thinking, text = first.content
        assert thinking.type == "thinking" and thinking.thinking == "Hm, hm."
        assert thinking.signature and text.type == "text" and text.text == "Seven."
        messages = [*HELLO, said_back(first), *HELLO]
        say(engine, chat, "<think>\nWell.\n</think>\n\nEight.")
        hidden = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
        second = await create(proxy, key, stream=stream, messages=messages, thinking=hidden)
        thinking, text = second.content
        assert thinking.type == "thinking" and thinking.thinking == "" and thinking.signature
        messages += [said_back(second), *HELLO]
        say(engine, chat, "Nine.")
        await create(proxy, key, stream=stream, messages=messages, thinking={"type": "disabled"})
        one, two, three = await proxy.recorded(session["session_id"])
        assert one.output_message["reasoning_content"] == "Hm, hm."
        assert (two.parent_id, three.parent_id) == (one.id, two.id), three.branch_reason
        assert two.request["recorded"]["thinking"] == hidden
        off = chat.variant({"enable_thinking": False})
        assert engine.requests[2]["input_ids"][-4:] == off.render(list(HELLO), None)[-4:]


async def test_messages_are_served_at_every_path_and_with_every_kind_of_key(proxy: Proxy) -> None:
    session = await proxy.open()
    key = session["api_key"]
    for path in ("/v1/messages", "/messages", "/v1/messages?beta=true"):
        assert (await post(proxy, key, path)).status_code == 200
    for path in (f"/{key}/v1/messages", f"/{key}/messages"):
        assert (await post(proxy, None, path)).status_code == 200
    response = await proxy.post("/v1/messages", {"max_tokens": 5, "messages": HELLO}, key)
    assert response.status_code == 200
    assert response.headers["x-any-agent-interaction"] == response.json()["id"]
    assert response.headers["request-id"].startswith("req_")
    async with agent_of(proxy, key) as agent:
        talk: list[Any] = [*HELLO]
        message = await agent.beta.messages.create(
            model="claude", max_tokens=5, messages=talk, betas=["x-2026-01-01"]
        )
        assert message.id.startswith("msg_")
        assert message._request_id == "req_" + message.id.removeprefix("msg_")
    assert len(await proxy.recorded(session["session_id"])) == 7


async def test_counted_tokens_are_those_of_the_call(
    proxy: Proxy, engine: ScriptedEngine, chat: ChatFormat
) -> None:
    bodies: list[dict[str, Any]] = [
        {},
        {"system": [{"type": "text", "text": "Be brief."}]},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": {"type": "any"}},
        {"tools": [*TOOLS, LATER], "messages": [*HELLO, *FOUND]},
        {"thinking": {"type": "enabled", "budget_tokens": 2000}},
        {"messages": [*HELLO, {"role": "assistant", "content": "Four."}, *HELLO]},
    ]
    for body in bodies:
        session = await proxy.open()
        async with agent_of(proxy, session["api_key"]) as agent:
            talk: dict[str, Any] = {"model": "claude", "messages": HELLO, **body}
            counted = await agent.messages.count_tokens(**talk)
        assert counted._request_id is not None and counted._request_id.startswith("req_")
        answer = await create(proxy, session["api_key"], **body)
        assert counted.input_tokens == answer.usage.input_tokens
        assert len(await proxy.recorded(session["session_id"])) == 1
    session = await proxy.open()
    key = session["api_key"]
    messages: list[Any] = list(HELLO)
    for text, most in (("yes", 50), (f"No.\n{CALL}", 200), ("It is cut off.", 3), ("Bye.", 50)):
        # The record may have left the memory.
        proxy.service.sessions.live[session["session_id"]].unload()
        # Counted twice, for a count is no call, and asked once.
        asked = {"messages": messages, "tools": TOOLS}
        path = "/messages/count_tokens"
        counts = [(await post(proxy, key, path, **asked)).json() for _ in range(2)]
        say(engine, chat, text)
        answer = await create(proxy, key, max_tokens=most, **asked)
        assert counts == [{"input_tokens": answer.usage.input_tokens}] * 2
        results = [{**RESULT, "tool_use_id": b.id} for b in answer.content if b.type == "tool_use"]
        text = {"type": "text", "text": "Go on.", "cache_control": {"type": "ephemeral"}}
        messages += [said_back(answer), {"role": "user", "content": [*results, text]}]
    await exact(proxy, session["session_id"])
    session = await proxy.open()
    for path in ("/messages/count_tokens", "/v1/messages/count_tokens?beta=true"):
        response = await post(proxy, session["api_key"], path, max_tokens=...)
        assert response.json() == {"input_tokens": len(chat.render(list(HELLO), None))}
    # Longer than the context: that is what an agent wants to know.
    long = [{"role": "user", "content": "word " * 2_500}]
    response = await post(proxy, session["api_key"], "/messages/count_tokens", messages=long)
    assert response.status_code == 200, response.text
    assert response.json()["input_tokens"] > engine.context_length
