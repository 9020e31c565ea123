"""Calls whose answer is forced, ends after one call, or is rendered with a request's arguments."""

from __future__ import annotations

from any_agent.chat import ChatFormat
from tests.proxy_ext.api.test_chat import say
from tests.proxy_ext.api.test_refusals import refusal
from tests.proxy_ext.api.test_streams import ARGUMENTS, CALL, TOOLS, argument_of
from tests.support.proxy import HELLO, Proxy
from tests.support.scripted_engine import ScriptedEngine


async def test_a_forced_call_is_opened_by_the_prompt_and_untrainable(
    proxy: Proxy, engine: ScriptedEngine, chat: ChatFormat
) -> None:
    session = await proxy.open()
    key = session["api_key"]
    choice = {"type": "function", "function": {"name": "find"}}
    plain = chat.render(list(HELLO), TOOLS)
    forced = chat.forced_call_ids(plain, "find")
    assert forced is not None
    rest = CALL.removeprefix(chat.decode(forced))
    for stream in (False, True):
        say(engine, chat, rest)
        if stream:
            events, _ = await proxy.stream(key, tools=TOOLS, tool_choice=choice, max_tokens=200)
            arguments = "".join(map(argument_of, events))
        else:
            answer = await proxy.complete(key, tools=TOOLS, tool_choice=choice, max_tokens=200)
            (call,) = answer["choices"][0]["message"]["tool_calls"]
            arguments = call["function"]["arguments"]
        assert arguments == ARGUMENTS
        assert engine.requests[-1]["input_ids"] == [*plain, *forced]
    for interaction in await proxy.recorded(session["session_id"]):
        assert interaction.untrainable_reason == "tool_choice"
        assert interaction.request["forced"] == len(forced)
        assert interaction.prompt_delta_ids.tolist() == [*plain, *forced]


async def test_each_choice_and_each_answer_has_ids_of_its_own(
    proxy: Proxy, engine: ScriptedEngine, chat: ChatFormat
) -> None:
    key = (await proxy.open())["api_key"]
    ids = []
    for _ in range(2):
        for _ in range(3):
            say(engine, chat, CALL)
        answer = await proxy.complete(key, tools=TOOLS, n=3, max_tokens=200)
        for choice in answer["choices"]:
            (call,) = choice["message"]["tool_calls"]
            ids.append(call["id"])
    assert len(set(ids)) == 6


async def test_without_parallel_calls_the_first_one_is_the_last(
    proxy: Proxy, engine: ScriptedEngine, chat: ChatFormat
) -> None:
    session = await proxy.open()
    say(engine, chat, CALL + "\n" + CALL)
    answer = await proxy.complete(
        session["api_key"], tools=TOOLS, parallel_tool_calls=False, max_tokens=400
    )
    (choice,) = answer["choices"]
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "tool_calls"
    (interaction,) = await proxy.recorded(session["session_id"])
    assert chat.decode(interaction.output_ids.tolist()) == CALL
    assert interaction.trainable


async def test_template_arguments_are_the_calls_own(
    proxy: Proxy, engine: ScriptedEngine, chat: ChatFormat
) -> None:
    key = (await proxy.open())["api_key"]
    await proxy.complete(key, chat_template_kwargs={"enable_thinking": True})
    await proxy.complete(key)
    with_thinking, without = (chat.decode(r["input_ids"]) for r in engine.requests)
    assert with_thinking != without
    response = await proxy.call(key, chat_template_kwargs={"no_such_thing": True})
    refusal(response, 400, "unsupported_parameter", "no_such_thing")


async def test_an_effort_and_template_arguments_agree(proxy: Proxy) -> None:
    key = (await proxy.open())["api_key"]
    for effort, thinking, status in (
        ("none", False, 200),
        ("none", None, 200),
        ("none", True, 400),
        ("high", False, 200),
    ):
        kwargs = {"enable_thinking": thinking}
        response = await proxy.call(key, reasoning_effort=effort, chat_template_kwargs=kwargs)
        assert response.status_code == status, (effort, thinking, response.text)
        if status == 400:
            refusal(response, 400, "invalid_request", "contradict each other")
