"""Calls whose answer is forced, ends after one call, or is rendered with a request's arguments."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from any_agent.chat import ChatFormat
from tests.proxy_ext.api.test_chat import say
from tests.proxy_ext.api.test_refusals import refusal
from tests.proxy_ext.test_metrics import scrape
from tests.support.openai_agent import CALL
from tests.support.openai_agent import CHAT_TOOLS as TOOLS
from tests.support.proxy import HELLO, Proxy
from tests.support.scripted_engine import ScriptedEngine
from tests.support.sessions import finalize, info

HEADER = "x-any-agent-untrainable"
BENT = {"response_format": {"type": "json_object"}}


async def test_an_untrainable_call_says_so_at_once(proxy: Proxy) -> None:
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    talk = {"model": "m", "messages": list(HELLO)}
    bodies: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("chat/completions", {**talk, "max_tokens": 20}, BENT),
        ("messages", {**talk, "max_tokens": 20}, {"output_config": {"format": schema}}),
        ("responses", {"model": "m", "input": "hi"}, {"text": {"format": {**schema, "name": "a"}}}),
    ]
    for mode in ("train", "eval"):
        key = (await proxy.open(mode=mode))["api_key"]
        for (api, body, bent), stream in itertools.product(bodies, (False, True)):
            for more, reason in (({}, None), (bent, "grammar" if mode == "train" else None)):
                answer = await proxy.post(f"/v1/{api}", {**body, "stream": stream, **more}, key)
                assert answer.status_code == 200, answer.text
                assert answer.headers.get(HEADER) == reason, (api, mode, stream)


async def test_finalize_says_how_many_calls_are_trained_on(
    proxy: Proxy, engine: ScriptedEngine, chat: ChatFormat
) -> None:
    session = await proxy.open()
    key = session["api_key"]
    for fields in ({}, BENT, BENT, {"presence_penalty": 1}):
        say(engine, chat, "{}")
        messages = [*HELLO, {"role": "user", "content": str(fields)}]
        await proxy.complete(key, messages=messages, **fields)
    # Of two answers to one request one is continued.
    say(engine, chat, "one")
    say(engine, chat, "two")
    both = await proxy.complete(key, n=2)
    say(engine, chat, "three")
    await proxy.complete(key, messages=[*HELLO, both["choices"][0]["message"], *HELLO])
    body = await finalize(proxy, session, final_reward=1.0)
    assert body["trainable_calls"] == 3
    assert body["untrainable_calls"] == {"grammar": 2, "penalty": 1, "discarded": 1}
    # Its choices, and its repetition, are one root.
    assert (body["roots"], body["root_reasons"]) == (4, {"new_conversation": 3})
    graded = await proxy.open(mode="eval")
    await proxy.complete(graded["api_key"], temperature=0)
    body = await finalize(proxy, graded, final_reward=1.0)
    assert (body["trainable_calls"], body["untrainable_calls"]) == (None, {})


async def test_a_service_whose_sessions_are_not_trained_on_says_why(
    proxy: Proxy, engine: ScriptedEngine, chat: ChatFormat, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(4):
        session = await proxy.open()
        for _ in range(2):
            say(engine, chat, "{}")
            await proxy.complete(session["api_key"], **(BENT if number else {}))
        await finalize(proxy, session, final_reward=1.0)
    why = "3 of the last 4 sessions have more calls that are not trained on (6 grammar)"
    (told,) = [r.getMessage() for r in caplog.records if "not trained on" in r.getMessage()]
    assert told.startswith(why)
    assert (await scrape(proxy))("any_agent_untrainable_sessions_total", reason="grammar") == 3
    await proxy.admit(0)
    refused = await proxy.http.post("/rl/v1/start_session", json={"wait": 0})
    refusal(refused, 429, "no_capacity", why)


async def test_a_service_whose_agents_rewrite_their_past_says_so(
    proxy: Proxy, engine: ScriptedEngine, chat: ChatFormat, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(4):
        session = await proxy.open()
        messages: list[Any] = [*HELLO]
        for _ in range(3):
            say(engine, chat, "one")
            answer = await proxy.complete(session["api_key"], messages=messages)
            answered = answer["choices"][0]["message"]
            if number:
                answered = {"role": "assistant", "content": "something else"}
            messages = [*messages, answered, *HELLO]
        expected = (3, {"history_rewritten": 2}) if number else (1, {})
        done = await finalize(proxy, session, final_reward=1.0)
        for told in (done, await info(proxy, session)):
            assert (told["roots"], told["root_reasons"]) == expected
    (said,) = [r.getMessage() for r in caplog.records if "history_rewritten" in r.getMessage()]
    assert said.startswith("3 of the last 4 sessions") and "6 history_rewritten" in said


async def test_without_parallel_calls_an_answer_ends_after_its_first_tool_call(
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
