"""Chat calls and responses of the direct client, through the SDK's own code."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from pydantic import create_model

from any_agent import EngineOpenAI
from any_agent.chat import ChatFormat
from any_agent.types import Continuation
from tests.direct.conftest import Make
from tests.support.direct import HELLO, MODEL, said
from tests.support.errors import fails_with
from tests.support.scripted_engine import ScriptedEngine


async def test_a_whole_answer_is_recorded_with_its_usage(
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


async def test_a_parsed_answer_is_recorded_as_untrainable(
    make: Make, engine: ScriptedEngine, chat: ChatFormat
) -> None:
    number = create_model("Number", value=int)
    client = make(mode="eval")
    engine.say(said(chat, '{"value": 7}'))
    parsed = await client.chat.completions.parse(
        model=MODEL, messages=HELLO, response_format=number
    )
    assert parsed.choices[0].message.parsed == number(value=7)
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


async def test_legacy_completions_stream_the_same_text(client: EngineOpenAI) -> None:
    whole = await client.completions.create(model=MODEL, prompt="one two", max_tokens=3)
    stream = await client.completions.create(
        model=MODEL, prompt="one two", max_tokens=3, stream=True
    )
    text = "".join([chunk.choices[0].text async for chunk in stream])
    assert text == whole.choices[0].text
    assert [i.id.startswith("cmpl-") for i in client.interactions] == [True, True]


async def test_wrong_calls_raise_the_sdks_exceptions_and_record_nothing(
    client: EngineOpenAI, engine: ScriptedEngine
) -> None:
    long = [{"role": "user", "content": "many words " * 2000}]
    wrong: list[tuple[dict[str, Any], str, str]] = [
        ({"messages": []}, "invalid_request", "messages"),
        ({"modalities": ["audio"]}, "unsupported_parameter", "modalities"),
        ({"temperature": 3}, "invalid_request", "temperature"),
        ({"extra_body": {"suffix": "x"}}, "unsupported_parameter", "suffix"),
        ({"messages": long}, "context_length_exceeded", "messages"),
    ]
    for fields, code, param in wrong:
        asked: dict[str, Any] = {"model": MODEL, "messages": HELLO} | fields
        with fails_with(openai.BadRequestError, code=code, param=param):
            await client.chat.completions.create(**asked)
    with fails_with(openai.BadRequestError, param="background"):
        await client.responses.create(model=MODEL, input="x", background=True)
    with fails_with(openai.NotFoundError, "/chat/completions"):
        await client.files.list()
    with fails_with(openai.NotFoundError, code="model_not_found"):
        await client.models.retrieve("gpt-4o")
    assert [model.id async for model in await client.models.list()] == ["policy"]
    assert (await client.models.retrieve("policy")).id == "policy"
    assert not engine.requests and not client.interactions


async def test_a_client_with_other_options_shares_the_session(client: EngineOpenAI) -> None:
    other = client.with_options(max_retries=0, timeout=5)
    assert isinstance(other, EngineOpenAI)
    completion = await other.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=2)
    client.set_reward(completion.id, 1.0)
    assert [i.reward for i in other.interactions] == [1.0]
    assert other.session_id == client.session_id
    with fails_with(TypeError, "base_url"):
        client.with_options(base_url="http://elsewhere.invalid")


async def test_a_response_can_be_read_again_continued_and_rewarded(
    client: EngineOpenAI, engine: ScriptedEngine, chat: ChatFormat
) -> None:
    engine.say(said(chat, "12 and 3"))
    answer = await client.responses.create(model=MODEL, input="Say a number.")
    assert answer.output_text == "12 and 3"
    assert answer.status == "completed"
    engine.say(said(chat, "Yes."))
    stream = await client.responses.create(
        model=MODEL, input="Sure?", previous_response_id=answer.id, stream=True
    )
    assert [event.type async for event in stream][-1] == "response.completed"
    first, second = client.interactions
    assert first.id == answer.id and second.continuation is Continuation.EXACT
    with fails_with(openai.NotFoundError, code="previous_response_not_found"):
        await client.responses.create(model=MODEL, input="x", previous_response_id="resp_other")
    assert await client.responses.retrieve(answer.id) == answer
    with fails_with(openai.NotFoundError, code="response_not_found"):
        await client.responses.retrieve("resp_none")
    await client.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(answer.id)
    # It stays a part of its session.
    client.set_reward(answer.id, 1.0)
    assert client.export_interactions()[answer.id].reward == 1.0


async def test_a_header_names_the_agent_of_several_that_calls(client: EngineOpenAI) -> None:
    talk: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 4}
    await client.chat.completions.create(**talk, extra_headers={"x-any-agent-role": "critic"})
    await client.with_options(default_headers={"X-Any-Agent-Role": "coder"}).completions.create(
        model=MODEL, prompt="2 + 2 =", max_tokens=4
    )
    await client.chat.completions.create(**talk)
    assert [one.role for one in client.interactions] == ["critic", "coder", ""]
    exported = client.export_interactions(style="individual")
    assert sorted(one.role for one in exported.values()) == ["", "coder", "critic"]
    with pytest.raises(openai.BadRequestError, match="a role is"):
        await client.chat.completions.create(**talk, extra_headers={"x-any-agent-role": "a b"})
    assert len(client.interactions) == 3
