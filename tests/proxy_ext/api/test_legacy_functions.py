"""What unmodified agents send beside today's chat: functions, a format with tools, odd names."""

from __future__ import annotations

import orjson
import pytest

from any_agent.chat import ChatFormat
from any_agent.types import Continuation
from tests.proxy_ext.api.test_chat import say
from tests.proxy_ext.api.test_refusals import refusal
from tests.proxy_ext.test_metrics import scrape
from tests.support.frozen import BODIES
from tests.support.openai_agent import CALL
from tests.support.openai_agent import CHAT_TOOLS as TOOLS
from tests.support.proxy import HELLO, Proxy
from tests.support.proxy_fixtures import Start
from tests.support.scripted_engine import ScriptedEngine

FUNCTIONS = [tool["function"] for tool in TOOLS]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}


@pytest.mark.parametrize("stream", [False, True])
async def test_functions_are_called_and_gone_on_from_exactly(
    proxy: Proxy, engine: ScriptedEngine, chat: ChatFormat, stream: bool
) -> None:
    session = await proxy.open()
    key, asked = session["api_key"], {"functions": FUNCTIONS, "max_tokens": 400}
    # A second call would have no place in the older form.
    say(engine, chat, CALL + "\n" + CALL)
    if stream:
        events, done = await proxy.stream(key, **asked)
        deltas = [event["choices"][0]["delta"] for event in events]
        steps = [delta["function_call"] for delta in deltas if "function_call" in delta]
        assert steps[0] == {"name": "find", "arguments": ""} and len(steps) > 2 and done
        call = {"name": "find", "arguments": "".join(step["arguments"] for step in steps)}
        assert not any("tool_calls" in delta for delta in deltas)
        assert events[-1]["choices"][0]["finish_reason"] == "function_call"
        message = {"role": "assistant", "content": None, "function_call": call}
    else:
        (choice,) = (await proxy.complete(key, **asked))["choices"]
        message = choice["message"]
        assert choice["finish_reason"] == "function_call" and "tool_calls" not in message
    assert message["function_call"] == {"name": "find", "arguments": '{"text": "né"}'}
    result = {"role": "function", "name": "find", "content": "3"}
    say(engine, chat, "It is 3.")
    talk = [*HELLO, message, result]
    (choice,) = (await proxy.complete(key, talk, **asked))["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("It is 3.", "stop")
    # The newer form is the same conversation, under the same tools.
    more = {"role": "user", "content": "Sure?"}
    await proxy.complete(key, [*talk, choice["message"], more], tools=TOOLS)
    first, second, third = await proxy.recorded(session["session_id"])
    assert chat.decode(first.output_ids.tolist()) == CALL
    assert first.finish_reason == "tool_calls" and first.trainable
    assert [i.continuation for i in (second, third)] == [Continuation.EXACT] * 2
    assert (second.parent_id, third.parent_id) == (first.id, second.id)
    before = [*first.prompt_delta_ids.tolist(), *first.output_ids.tolist()]
    assert engine.requests[-2]["input_ids"][: len(before)] == before
    new = {"role": "tool", "tool_call_id": "call_1", "name": "find", "content": "3"}
    added = chat.bridge(first.output_ids, [new], TOOLS, answer=first.output_message)
    assert engine.requests[-2]["input_ids"] == [*before, *(added or ())]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.service
async def test_an_unknown_parameter_stops_no_agent(
    proxy: Proxy, engine: ScriptedEngine, path: str
) -> None:
    session = await proxy.open()
    odd = {"beam_width": 7, "x\r\ny": [1], "api_key": "abc"}
    plain = await proxy.post(path, BODIES[path], session["api_key"])
    response = await proxy.post(path, BODIES[path] | odd, session["api_key"])
    assert response.status_code == 200, response.text
    assert response.headers["x-any-agent-ignored"] == "beam_width, x__y, api_key"
    assert "x-any-agent-ignored" not in plain.headers
    one, other = (request["sampling_params"] for request in engine.requests)
    assert one == other
    before, interaction = await proxy.recorded(session["session_id"])
    assert interaction.request["ignored"] == ["beam_width", "x__y", "api_key"]
    assert interaction.request["recorded"] == {"beam_width": 7, "x__y": [1]}
    assert interaction.trainable and "ignored" not in before.request
    now = await scrape(proxy)
    assert now("any_agent_ignored_parameters_total", parameter="beam_width") == 1


async def test_metrics_tell_a_bounded_number_of_unknown_parameters_apart(proxy: Proxy) -> None:
    key = (await proxy.open(mode="eval"))["api_key"]
    for k in range(0, 60, 20):
        await proxy.complete(key, **{f"p{n}": 1 for n in range(k, k + 20)})
    now = await scrape(proxy)
    assert len(now.labels("any_agent_ignored_parameters_total", "parameter")) == 33
    assert now("any_agent_ignored_parameters_total", parameter="other") == 28


async def test_unknown_parameters_may_be_refused(start: Start) -> None:
    proxy = await start("server.unknown_parameters=refuse", admit=4)
    session = await proxy.open()
    for path, body in BODIES.items():
        response = await proxy.post(path, {**body, "beam_width": 7}, session["api_key"])
        assert response.status_code == 400 and "beam_width" in response.text
    await proxy.complete(session["api_key"], enable_thinking=True)
    assert len(await proxy.recorded(session["session_id"])) == 1


async def test_a_format_with_tools_reaches_the_engine(
    proxy: Proxy, engine: ScriptedEngine, chat: ChatFormat
) -> None:
    session = await proxy.open()
    key = session["api_key"]
    say(engine, chat, CALL)
    answer = await proxy.complete(key, tools=TOOLS, response_format=FORMAT, max_tokens=200)
    assert answer["choices"][0]["message"]["tool_calls"]
    sent = engine.requests[-1]["sampling_params"]
    assert "json_schema" not in sent
    tag = orjson.loads(sent["structural_tag"])
    _, either = tag["format"]["elements"]
    text, calls = either["elements"]
    assert tag["type"] == "structural_tag" and either["type"] == "or"
    assert text == {"type": "json_schema", "json_schema": SCHEMA}
    vocab = chat.tokenizer.get_vocab()
    assert calls["elements"][0]["elements"][0] == {"type": "token", "token": vocab["<tool_call>"]}
    (interaction,) = await proxy.recorded(session["session_id"])
    assert interaction.untrainable_reason == "grammar"
    assert orjson.loads(interaction.gconfig.grammar)["structural_tag"] == tag
    odd = [{"type": "function", "function": {"name": 'say "a"'}}]
    response = await proxy.call(key, tools=odd, response_format=FORMAT)
    refusal(response, 400, "unsupported_parameter", "response_format together with tools")
    wanted = {"type": "json_schema", "schema": {"uniqueItems": True}, "name": "a"}
    body = {"input": "hi", "text": {"format": wanted}, "tools": [{"type": "function", "name": "f"}]}
    response = await proxy.post("/v1/responses", body, key)
    error = refusal(response, 400, "unsupported_parameter", "uniqueItems")
    assert error["param"] == "text.format"
