"""Agents that open no sessions, by every API: one conversation is one session."""

from __future__ import annotations

from typing import Any

import pytest

from tests.proxy_ext.api.test_refusals import refusal
from tests.support.implicit import KEY, MORE, ONE, client, says, session, settings
from tests.support.messages import agent_of, said_back
from tests.support.proxy import Proxy
from tests.support.proxy_fixtures import Start

INSTRUCTIONS, ASKED = ONE[0]["content"], ONE[1]["content"]


@pytest.fixture
async def proxy(start: Start) -> Proxy:
    proxy = await start(*settings())
    await proxy.admit(100)
    return proxy


def turns(proxy: Proxy) -> list[str]:
    """How each call of the only session came about."""
    (id,) = proxy.service.sessions.live
    return [str(i.continuation) for i in session(proxy, id).tree]


async def test_chat_streamed(proxy: Proxy) -> None:
    messages: list[Any] = list(ONE)
    async with client(proxy) as agent:
        for _ in range(2):
            parts = await agent.chat.completions.create(
                model="m", messages=messages, max_tokens=8, stream=True
            )
            texts = [c.choices[0].delta.content or "" async for c in parts if c.choices]
            messages += [{"role": "assistant", "content": "".join(texts)}, MORE]
    assert turns(proxy) == ["root", "exact"]


@pytest.mark.parametrize("stream", [False, True])
async def test_messages(proxy: Proxy, stream: bool) -> None:
    asked: dict[str, Any] = {"model": "claude", "max_tokens": 8, "system": INSTRUCTIONS}
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    async with agent_of(proxy, KEY) as agent:
        for _ in range(2):
            if stream:
                async with agent.messages.stream(messages=messages, **asked) as events:
                    answer = await events.get_final_message()
            else:
                answer = await agent.messages.create(messages=messages, **asked)
            messages += [said_back(answer), MORE]
    assert turns(proxy) == ["root", "exact"]


@pytest.mark.parametrize("named", [False, True])
async def test_responses(proxy: Proxy, named: bool) -> None:
    """The whole conversation again, or what is new and the earlier answer's id."""
    asked: dict[str, Any] = {
        "model": "m",
        "instructions": INSTRUCTIONS,
        "max_output_tokens": 16,
    }
    async with client(proxy) as agent:
        first = await agent.responses.create(input=ASKED, **asked)
        if named:
            again = await agent.responses.create(
                input="Another one.", previous_response_id=first.id, **asked
            )
        else:
            said = [item.to_dict(mode="json") for item in first.output]
            whole: Any = [{"role": "user", "content": ASKED}, *said, MORE]
            again = await agent.responses.create(input=whole, **asked)
        assert turns(proxy) == ["root", "exact"]
        assert (await agent.responses.retrieve(again.id)).output_text == again.output_text
        items = await agent.responses.input_items.list(first.id)
        assert len(items.data) == 1


async def test_a_response_that_is_nobodys(proxy: Proxy) -> None:
    body = {"model": "m", "input": "hi", "previous_response_id": "resp_0000" + "0" * 28}
    response = await proxy.post("/v1/responses", body, KEY)
    refusal(response, 404, "previous_response_not_found", "previous_response_id")
    response = await proxy.http.get("/v1/responses/resp_0000abc")
    refusal(response, 404, "response_not_found", "resp_0000abc")
    assert not proxy.service.sessions.live


async def test_one_conversation_over_all_apis(proxy: Proxy) -> None:
    first, id = await says(proxy, ONE)
    async with agent_of(proxy, KEY) as agent:
        messages: Any = [*ONE[1:], {"role": "assistant", "content": first["content"]}, MORE]
        second = await agent.messages.create(
            model="claude", max_tokens=8, system=INSTRUCTIONS, messages=messages
        )
    messages += [said_back(second), MORE]
    async with client(proxy) as other:
        asked: Any = [{"role": m["role"], "content": text_of(m)} for m in messages]
        await other.responses.create(
            model="m", instructions=INSTRUCTIONS, input=asked, max_output_tokens=16
        )
    assert list(proxy.service.sessions.live) == [id]
    assert turns(proxy) == ["root", "exact", "exact"]


def text_of(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


async def test_legacy_completions_need_a_session(proxy: Proxy) -> None:
    response = await proxy.post("/v1/completions", {"model": "m", "prompt": "a"}, KEY)
    refusal(response, 400, "no_conversation", "start_session")
    assert not proxy.service.sessions.live
