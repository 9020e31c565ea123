"""`/v1/messages` by Anthropic's SDK: answers, records, exact continuation, also across APIs."""

from __future__ import annotations

import json
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from any_agent.chat import ChatFormat, load_chat_format
from any_agent.completions import prepare as begin
from any_agent.completions.messages.parse import parse_count
from any_agent.completions.prepare import count_tokens
from any_agent.types import Continuation
from proxy_ext.api import model_routes as wire
from tests.proxy_ext.api.test_chat import say
from tests.support.messages import CALL, CHAT_TOOLS, TOOLS, agent_of, create, post, said_back
from tests.support.proxy import HELLO, Proxy, config_for, running_proxy
from tests.support.proxy_fixtures import Start
from tests.support.scripted_engine import ScriptedEngine

RESULT = {"type": "tool_result", "content": "it is there"}
LATER = {**TOOLS[0], "name": "later", "defer_loading": True}
FOUND = [
    {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "x", "name": "find", "input": {"text": "it"}}],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "x",
                "content": [{"type": "tool_reference", "tool_name": "later"}],
            }
        ],
    },
]


async def exact(proxy: Proxy, session_id: str) -> list[Any]:
    """A session's interactions, each of which continues the one before."""
    recorded = await proxy.recorded(session_id)
    for before, after in pairwise(recorded):
        assert after.parent_id == before.id, after.branch_reason
        assert after.continuation is Continuation.EXACT
    return recorded


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer(
    proxy: Proxy, engine: ScriptedEngine, chat: ChatFormat, stream: bool
) -> None:
    session = await proxy.open()
    ids = say(engine, chat, "4 and 2")
    answer = await create(proxy, session["api_key"], stream=stream, system="Be brief.")
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "claude")
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "4 and 2"}]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    prompt = engine.requests[0]["input_ids"]
    assert prompt == chat.render([{"role": "system", "content": "Be brief."}, *HELLO], None)
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(prompt), len(ids))
    (interaction,) = await proxy.recorded(session["session_id"])
    assert interaction.id == answer.id and answer.id.startswith("msg_")
    assert interaction.prompt_delta_ids.tolist() == prompt
    assert interaction.output_ids.tolist() == ids
    assert interaction.trainable
    response = await proxy.post(
        "/rl/v1/set_reward", {"reward": 1, "interaction_id": answer.id}, session["api_key"]
    )
    assert response.status_code == 200, response.text


async def test_whole_and_streamed_answers_are_one(
    proxy: Proxy, engine: ScriptedEngine, chat: ChatFormat
) -> None:
    key = (await proxy.open())["api_key"]
    for text in ("plain", f"First.\n{CALL}", f"{CALL}\n{CALL}", f"{CALL} then text", ""):
        answers = []
        for stream in (False, True):
            say(engine, chat, text)
            answers.append(await create(proxy, key, stream=stream, tools=TOOLS))
        whole, streamed = (answer.to_dict() for answer in answers)
        for answer in (whole, streamed):
            answer.pop("id")
            for block in answer["content"]:  # type: ignore[attr-defined]
                block.pop("id", None)
        assert whole == streamed, text


@pytest.mark.parametrize("stream", [False, True])
async def test_three_turns_with_a_tool_go_on_exactly(
    proxy: Proxy, engine: ScriptedEngine, chat: ChatFormat, stream: bool
) -> None:
    session = await proxy.open()
    key = session["api_key"]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Find it."}]
    say(engine, chat, f"I look.\n{CALL}")
    first = await create(proxy, key, stream=stream, messages=messages, tools=TOOLS)
    text, use = first.content
    assert first.stop_reason == "tool_use"
    assert text.type == "text" and text.text == "I look."
    assert use.type == "tool_use" and use.input == {"text": "a long text"}
    assert use.id.startswith("toolu_")
    result = {**RESULT, "tool_use_id": use.id}
    messages += [said_back(first), {"role": "user", "content": [result, *_text("And now?")]}]
    say(engine, chat, "It is there.")
    second = await create(proxy, key, stream=stream, messages=messages, tools=TOOLS)
    messages += [said_back(second), {"role": "user", "content": _text("Thanks.")}]
    say(engine, chat, "Bye.")
    await create(proxy, key, stream=stream, messages=messages, tools=TOOLS)
    one, two, _ = await exact(proxy, session["session_id"])
    (call,) = one.output_message["tool_calls"]
    assert call["id"] == use.id.replace("toolu_", "call_")
    assert two.message_delta == [
        {"role": "tool", "tool_call_id": call["id"], "content": "it is there"},
        {"role": "user", "content": "And now?"},
    ]
    prompts = [request["input_ids"] for request in engine.requests]
    assert prompts[1][: len(prompts[0])] == prompts[0]
    assert prompts[2][: len(prompts[1])] == prompts[1]


def _text(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]


async def test_a_session_goes_on_from_one_api_to_the_other(
    proxy: Proxy, engine: ScriptedEngine, chat: ChatFormat
) -> None:
    session = await proxy.open()
    key = session["api_key"]
    conversation: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Find it."},
    ]
    say(engine, chat, CALL)
    answer = await proxy.complete(key, conversation, tools=CHAT_TOOLS, max_tokens=200)
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    function = call["function"]
    use = {"type": "tool_use", "id": call["id"], "name": function["name"]}
    messages = [
        conversation[1],
        {"role": "assistant", "content": [{**use, "input": json.loads(function["arguments"])}]},
        {"role": "user", "content": [{**RESULT, "tool_use_id": call["id"]}]},
    ]
    say(engine, chat, f"Again.\n{CALL}")
    second = await create(proxy, key, system="Be brief.", messages=messages, tools=TOOLS)
    text, again = second.content
    assert text.type == "text" and again.type == "tool_use"
    conversation += [
        {**answer["choices"][0]["message"]},
        {"role": "tool", "tool_call_id": call["id"], "content": "it is there"},
        {
            "role": "assistant",
            "content": text.text,
            "tool_calls": [
                {
                    "id": again.id,
                    "type": "function",
                    "function": {"name": "find", "arguments": json.dumps(again.input)},
                }
            ],
        },
        {"role": "tool", "tool_call_id": again.id, "content": "it is there"},
    ]
    say(engine, chat, "Done.")
    await proxy.complete(key, conversation, tools=CHAT_TOOLS, max_tokens=200)
    assert len(await exact(proxy, session["session_id"])) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_arguments_that_are_no_json_come_back_as_they_were(
    proxy: Proxy, engine: ScriptedEngine, chat: ChatFormat, stream: bool
) -> None:
    session = await proxy.open()
    key = session["api_key"]
    # Cut off within its arguments.
    ids = chat.tokenizer.encode(CALL)
    cut = next(k for k in range(len(ids)) if '"a long' in chat.decode(ids[:k]))
    engine.say([*ids[:cut], *ids])
    answer = await create(proxy, key, stream=stream, tools=TOOLS, max_tokens=cut)
    assert answer.stop_reason == "max_tokens"
    (use,) = answer.content
    assert use.type == "tool_use"
    (text,) = use.input.values()
    assert isinstance(text, str) and text.startswith('{"text"')
    result = {"type": "tool_result", "tool_use_id": use.id, "is_error": True}
    messages = [*HELLO, said_back(answer), {"role": "user", "content": [result]}]
    await create(proxy, key, stream=stream, messages=messages, tools=TOOLS)
    first, second = await proxy.recorded(session["session_id"])
    (call,) = first.output_message["tool_calls"]
    assert call["function"]["arguments"] == text
    # The answer was known again; whether it can be continued is for the template to say.
    assert second.branch_reason in (None, "template_declines")
    assert second.message_delta[-1]["content"] == "Error"


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_sequences(
    proxy: Proxy, engine: ScriptedEngine, chat: ChatFormat, stream: bool
) -> None:
    session = await proxy.open()
    say(engine, chat, "one two three")
    stops = ["three", "two"]
    answer = await create(proxy, session["api_key"], stream=stream, stop_sequences=stops)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "two")
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "one "}]
    (interaction,) = await proxy.recorded(session["session_id"])
    assert interaction.request["matched_stop"] == 1
    say(engine, chat, "one")
    answer = await create(proxy, session["api_key"], stream=stream, stop_sequences=stops)
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)


@pytest.mark.parametrize("stream", [False, True])
async def test_it_is_cut_off_at_max_tokens(
    proxy: Proxy, engine: ScriptedEngine, chat: ChatFormat, stream: bool
) -> None:
    key = (await proxy.open())["api_key"]
    say(engine, chat, "one two three four five")
    answer = await create(proxy, key, stream=stream, max_tokens=3)
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 3)
    # More than the context has is no error: agents ask for what another model could write.
    say(engine, chat, "one")
    answer = await create(proxy, key, stream=stream, max_tokens=1_000_000)
    assert answer.stop_reason == "end_turn"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_that_must_be_called(
    proxy: Proxy, engine: ScriptedEngine, chat: ChatFormat, stream: bool
) -> None:
    session = await proxy.open()
    plain = chat.render(list(HELLO), CHAT_TOOLS)
    forced = chat.forced_call_ids(plain, "find")
    assert forced is not None
    say(engine, chat, CALL.removeprefix(chat.decode(forced)))
    choice = {"type": "tool", "name": "find", "disable_parallel_tool_use": True}
    answer = await create(proxy, session["api_key"], stream=stream, tools=TOOLS, tool_choice=choice)
    (use,) = answer.content
    assert use.type == "tool_use" and use.input == {"text": "a long text"}
    assert answer.usage.input_tokens == len(plain) + len(forced)
    (interaction,) = await proxy.recorded(session["session_id"])
    assert interaction.trainable
    say(engine, chat, "no")
    none = await create(
        proxy, session["api_key"], stream=stream, tools=TOOLS, tool_choice={"type": "none"}
    )
    assert none.usage.input_tokens == len(chat.render(list(HELLO), None))


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


async def test_every_path_and_key(proxy: Proxy) -> None:
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


async def test_claude_codes_billing_line_does_not_break_a_conversation(
    proxy: Proxy, engine: ScriptedEngine, chat: ChatFormat
) -> None:
    session = await proxy.open()
    messages: list[Any] = list(HELLO)
    for k in range(3):
        billing = f"x-anthropic-billing-header: cc_version=2.1; cch=00{k};"
        system = [{"type": "text", "text": billing}, {"type": "text", "text": "Be brief."}]
        say(engine, chat, "yes")
        answer = await create(proxy, session["api_key"], system=system, messages=messages)
        messages += [said_back(answer), *HELLO]
    await exact(proxy, session["session_id"])


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
            asked: dict[str, Any] = {"model": "claude", "messages": HELLO, **body}
            counted = await agent.messages.count_tokens(**asked)
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
        counts = [
            (
                await post(proxy, key, "/messages/count_tokens", messages=messages, tools=TOOLS)
            ).json()
            for _ in range(2)
        ]
        say(engine, chat, text)
        answer = await create(proxy, key, messages=messages, tools=TOOLS, max_tokens=most)
        assert counts == [{"input_tokens": answer.usage.input_tokens}] * 2
        results = [{**RESULT, "tool_use_id": b.id} for b in answer.content if b.type == "tool_use"]
        content = [*results, *_text("Go on.")]
        messages += [said_back(answer), {"role": "user", "content": content}]
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


async def test_a_long_count_is_read_off_the_loop(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = (await proxy.open())["api_key"]
    threads: list[threading.Thread] = []

    def noted(*args: Any, **fields: Any) -> Any:
        threads.append(threading.current_thread())
        return parse_count(*args, **fields)

    monkeypatch.setattr(wire, "parse_count", noted)
    path = "/v1/messages/count_tokens"
    short = await post(proxy, key, path)
    monkeypatch.setattr(begin, "LONG_WHOLE", 100)
    long = [{"type": "text", "text": text} for text in ("Say ", "a ", "number.")]
    counted = await post(proxy, key, path, messages=[{"role": "user", "content": long}])
    assert counted.json() == short.json()
    assert [thread is threading.main_thread() for thread in threads] == [True, False]
    refused = await post(proxy, key, path, messages=[{"role": "user", "content": [3] * 100}])
    assert refused.status_code == 400, refused.text


async def test_counts_take_turns_with_calls(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = proxy.service.calls.render_turns
    done: list[str] = []
    next_turn = turns.wait

    async def noted_turn() -> None:
        await next_turn()
        done.append("turn")

    async def noted_count(*args: Any) -> int:
        done.append("count")
        return await count_tokens(*args)

    monkeypatch.setattr(turns, "wait", noted_turn)
    monkeypatch.setattr(wire, "count_tokens", noted_count)
    key = (await proxy.open())["api_key"]
    for _ in range(2):
        assert (await post(proxy, key, "/v1/messages/count_tokens")).status_code == 200
    assert done == ["turn", "count"] * 2


async def test_a_given_format(start: Start, engine: ScriptedEngine) -> None:
    proxy = await start()
    await proxy.admit(5)
    session = await proxy.open()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "schema": schema}
    for fields in ({"output_config": {"format": wanted}}, {"output_format": wanted}):
        await post(proxy, session["api_key"], **fields)
        assert json.loads(engine.requests[-1]["sampling_params"]["json_schema"]) == schema
    for interaction in await proxy.recorded(session["session_id"]):
        assert interaction.untrainable_reason == "grammar"
