"""Chat calls of the direct client, through the SDK's own code."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from any_agent import EngineOpenAI
from any_agent.chat import ChatFormat
from any_agent.types import Continuation
from tests.direct.conftest import Make
from tests.support.direct import CALL, HELLO, MODEL, MORE, TOOLS, said
from tests.support.errors import fails_with
from tests.support.scripted_engine import ScriptedEngine


async def test_a_whole_answer(
    client: EngineOpenAI, engine: ScriptedEngine, chat: ChatFormat
) -> None:
    engine.say(said(chat, "12 and 3"))
    completion = await client.chat.completions.create(model=MODEL, messages=HELLO)
    assert completion.choices[0].message.content == "12 and 3"
    assert completion.choices[0].finish_reason == "stop"
    assert completion.model == MODEL
    (recorded,) = client.interactions
    assert recorded.id == completion.id
    assert recorded.output_ids.tolist() == said(chat, "12 and 3")
    assert recorded.session_id == client.session_id
    assert client.get_interaction(completion.id) is recorded
    usage = completion.usage
    assert usage is not None
    assert usage.completion_tokens == len(recorded.output_ids)
    assert usage.prompt_tokens == len(recorded.prompt_delta_ids)


async def test_a_stream_has_the_text_in_parts_and_its_usage_last(
    client: EngineOpenAI, engine: ScriptedEngine, chat: ChatFormat
) -> None:
    engine.say(said(chat, "12 and 3"))
    stream = await client.chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    assert isinstance(stream, openai.AsyncStream)
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "12 and 3"
    assert len(chunks) > 4
    assert chunks[-1].usage is not None
    (recorded,) = client.interactions
    assert {c.id for c in chunks} == {recorded.id}
    assert recorded.output_ids.tolist() == said(chat, "12 and 3")


async def test_the_stream_helper_accumulates_the_whole_answer(
    client: EngineOpenAI, engine: ScriptedEngine, chat: ChatFormat
) -> None:
    engine.say(said(chat, CALL))
    asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "tools": TOOLS}
    async with client.chat.completions.stream(**asked) as stream:
        kinds = {event.type async for event in stream}
        final = await stream.get_final_completion()
    assert {"chunk", "tool_calls.function.arguments.delta"} <= kinds
    (recorded,) = client.interactions
    told = final.choices[0].message.tool_calls
    assert told is not None
    assert [(c.id, c.function.name, c.function.arguments) for c in told] == [
        (c["id"], c["function"]["name"], c["function"]["arguments"])
        for c in recorded.output_message["tool_calls"]
    ]


class Number(BaseModel):
    value: int


async def test_a_parsed_answer_is_recorded_as_untrainable(
    make: Make, engine: ScriptedEngine, chat: ChatFormat
) -> None:
    client = make(mode="eval")
    engine.say(said(chat, '{"value": 7}'))
    parsed = await client.chat.completions.parse(
        model=MODEL, messages=HELLO, response_format=Number
    )
    assert parsed.choices[0].message.parsed == Number(value=7)
    (recorded,) = client.interactions
    assert recorded.untrainable_reason == "grammar"


async def test_raw_responses_have_the_headers_of_a_service(client: EngineOpenAI) -> None:
    raw = await client.chat.completions.with_raw_response.create(
        model=MODEL, messages=HELLO, max_tokens=4, temperature=0.2
    )
    assert raw.headers["x-any-agent-interaction"] == raw.parse().id
    assert raw.headers["x-any-agent-session"] == client.session_id
    assert raw.headers["x-any-agent-version"] == "0"
    assert json.loads(raw.headers["x-any-agent-overrides"]) == {"temperature": 1.0}
    manager = client.chat.completions.with_streaming_response.create(
        model=MODEL, messages=HELLO, max_tokens=4, stream=True
    )
    async with manager as response:
        lines = [line async for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert len(client.interactions) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_three_turns_with_a_tool_continue_exactly(
    client: EngineOpenAI, engine: ScriptedEngine, chat: ChatFormat, stream: bool
) -> None:
    messages = list(HELLO)
    for text in (CALL, "It is 5.", "And 6."):
        engine.say(said(chat, text))
        asked: dict[str, Any] = {"model": MODEL, "messages": messages, "tools": TOOLS}
        if stream:
            async with client.chat.completions.stream(**asked) as events:
                message = (await events.get_final_completion()).choices[0].message
        else:
            message = (await client.chat.completions.create(**asked)).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if message.tool_calls:
            id = message.tool_calls[0].id
            messages.append({"role": "tool", "tool_call_id": id, "content": "5"})
        else:
            messages.append(MORE)
    kinds = [i.continuation for i in client.interactions]
    assert kinds == [Continuation.ROOT, Continuation.EXACT, Continuation.EXACT]
    prompts = [request["input_ids"] for request in engine.requests]
    for before, after, i in zip(prompts, prompts[1:], client.interactions, strict=False):
        whole = [*before, *i.output_ids.tolist()]
        assert after[: len(whole)] == whole


@pytest.mark.parametrize("stream", [False, True])
async def test_each_choice_is_an_interaction(client: EngineOpenAI, stream: bool) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "n": 2, "max_tokens": 3}
    if stream:
        events = await client.chat.completions.create(**asked, stream=True)
        chunks = [chunk async for chunk in events]
        (id,) = {chunk.id for chunk in chunks}
        ends = [c.choices[0].index for c in chunks if c.choices[0].finish_reason]
        assert sorted(ends) == [0, 1]
    else:
        completion = await client.chat.completions.create(**asked)
        id = completion.id
        assert [choice.index for choice in completion.choices] == [0, 1]
    assert {i.id for i in client.interactions} == {f"{id}.0", f"{id}.1"}


async def test_logprobs_are_the_recorded_ones(client: EngineOpenAI) -> None:
    completion = await client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=3, logprobs=True
    )
    told = completion.choices[0].logprobs
    assert told is not None and told.content is not None
    (recorded,) = client.interactions
    assert [entry.logprob for entry in told.content] == pytest.approx(
        recorded.output_logprobs.tolist()
    )


async def test_legacy_completions_stream_the_same_text(client: EngineOpenAI) -> None:
    whole = await client.completions.create(model=MODEL, prompt="one two", max_tokens=3)
    stream = await client.completions.create(
        model=MODEL, prompt="one two", max_tokens=3, stream=True
    )
    text = "".join([chunk.choices[0].text async for chunk in stream])
    assert text == whole.choices[0].text
    assert [i.id.startswith("cmpl-") for i in client.interactions] == [True, True]


async def test_the_policy_is_the_only_model(client: EngineOpenAI) -> None:
    assert [model.id async for model in await client.models.list()] == ["policy"]
    assert (await client.models.retrieve("policy")).id == "policy"
    with fails_with(openai.NotFoundError, code="model_not_found"):
        await client.models.retrieve("gpt-4o")


async def test_what_is_wrong_is_said_by_the_sdks_exceptions(
    client: EngineOpenAI, engine: ScriptedEngine
) -> None:
    wrong: list[tuple[dict[str, Any], str, str]] = [
        ({"messages": []}, "invalid_request", "messages"),
        ({"modalities": ["audio"]}, "unsupported_parameter", "modalities"),
        ({"temperature": 3}, "invalid_request", "temperature"),
        ({"extra_body": {"suffix": "x"}}, "unsupported_parameter", "suffix"),
        (
            {"messages": [{"role": "user", "content": "many words " * 2000}]},
            "context_length_exceeded",
            "messages",
        ),
    ]
    for fields, code, param in wrong:
        asked: dict[str, Any] = {"model": MODEL, "messages": HELLO} | fields
        with fails_with(openai.BadRequestError, code=code, param=param):
            await client.chat.completions.create(**asked)
    with fails_with(openai.NotFoundError, "/chat/completions"):
        await client.files.list()
    assert not engine.requests
    assert not client.interactions


async def test_other_options_are_of_the_same_session(client: EngineOpenAI) -> None:
    other = client.with_options(max_retries=0, timeout=5)
    assert isinstance(other, EngineOpenAI)
    completion = await other.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=2)
    client.set_reward(completion.id, 1.0)
    assert [i.reward for i in other.interactions] == [1.0]
    assert other.session_id == client.session_id
    with fails_with(TypeError, "base_url"):
        client.with_options(base_url="http://elsewhere.invalid")
