"""Calls whose answer is forced, ends after one call, or is rendered with a request's arguments."""

from __future__ import annotations

from typing import Any

import pytest

from any_agent.chat import ChatFormat
from tests.proxy_ext.api.test_chat import say
from tests.proxy_ext.api.test_refusals import refusal
from tests.proxy_ext.api.test_streams import ARGUMENTS, CALL, TOOLS, argument_of
from tests.proxy_ext.test_metrics import scrape
from tests.support.proxy import HELLO, Proxy
from tests.support.scripted_engine import ScriptedEngine


async def test_a_forced_call_is_opened_by_the_prompt_and_trained_on(
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
        assert interaction.trainable
        assert chat.decode(interaction.output_ids.tolist()).startswith(rest)
        assert interaction.request["forced"] == len(forced)
        assert interaction.prompt_delta_ids.tolist() == [*plain, *forced]


HEADER = "x-any-agent-untrainable"
BENT = {"response_format": {"type": "json_object"}}


@pytest.mark.parametrize("api", ["chat/completions", "responses", "messages"])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_untrainable_call_says_so_at_once(
    proxy: Proxy, engine: ScriptedEngine, chat: ChatFormat, api: str, stream: bool
) -> None:
    said: dict[str, Any] = {"model": "m", "messages": list(HELLO), "stream": stream}
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    bent: dict[str, Any] = BENT
    if api == "responses":
        bent = {"text": {"format": {**schema, "name": "any"}}}
        said["input"] = said.pop("messages")
    elif api == "messages":
        bent = {"output_config": {"format": schema}}
        said["max_tokens"] = 20
    for mode in ("train", "eval"):
        session = await proxy.open(mode=mode)
        for fields, reason in (({}, None), (bent, "grammar" if mode == "train" else None)):
            say(engine, chat, "{}")
            answer = await proxy.http.post(
                f"/v1/{api}",
                json=said | fields,
                headers={"authorization": f"Bearer {session['api_key']}"},
            )
            assert answer.status_code == 200, answer.text
            assert answer.headers.get(HEADER) == reason


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
    done = await proxy.post("/rl/v1/finalize", {"final_reward": 1.0}, key)
    assert done.status_code == 200
    body = done.json()
    assert body["trainable_calls"] == 3
    assert body["untrainable_calls"] == {"grammar": 2, "penalty": 1, "discarded": 1}
    # Its choices, and its repetition, are one root.
    assert (body["roots"], body["root_reasons"]) == (4, {"new_conversation": 3})
    graded = await proxy.open(mode="eval")
    await proxy.complete(graded["api_key"], temperature=0)
    done = await proxy.post("/rl/v1/finalize", {"final_reward": 1.0}, graded["api_key"])
    assert (done.json()["trainable_calls"], done.json()["untrainable_calls"]) == (None, {})


async def test_a_service_whose_sessions_are_not_trained_on_says_why(
    proxy: Proxy, engine: ScriptedEngine, chat: ChatFormat, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(4):
        key = (await proxy.open())["api_key"]
        for _ in range(2):
            say(engine, chat, "{}")
            await proxy.complete(key, **(BENT if number else {}))
        done = await proxy.post("/rl/v1/finalize", {"final_reward": 1.0}, key)
        assert done.status_code == 200
    why = "3 of the last 4 sessions have more calls that are not trained on (6 grammar)"
    (told,) = [r.getMessage() for r in caplog.records if "not trained on" in r.getMessage()]
    assert told.startswith(why)
    assert (await scrape(proxy))("any_agent_untrainable_sessions_total", reason="grammar") == 3
    await proxy.admit(0)
    refused = await proxy.http.post("/rl/v1/start_session", json={"wait": 0})
    assert refused.status_code == 429
    assert why in refused.json()["error"]["message"]


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
        done = await proxy.post("/rl/v1/finalize", {"final_reward": 1.0}, session["api_key"])
        broken = {"history_rewritten": 2} if number else {}
        assert (done.json()["roots"], done.json()["root_reasons"]) == (3 if number else 1, broken)
        shown = (await proxy.http.get(f"/rl/v1/sessions/{session['session_id']}")).json()
        assert (shown["roots"], shown["root_reasons"]) == (done.json()["roots"], broken)
    (told,) = [r.getMessage() for r in caplog.records if "history_rewritten" in r.getMessage()]
    assert told.startswith("3 of the last 4 sessions") and "6 history_rewritten" in told


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
