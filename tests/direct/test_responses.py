"""Responses of the direct client, through the SDK's own code."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from any_agent import EngineOpenAI
from any_agent.chat import ChatFormat
from any_agent.types import Continuation
from tests.support.direct import CALL, MODEL, TOOLS, said
from tests.support.errors import fails_with
from tests.support.scripted_engine import ScriptedEngine

ADD: dict[str, Any] = {"type": "function", **TOOLS[0]["function"]}


async def test_a_response_can_be_read_again_and_rewarded(
    client: EngineOpenAI, engine: ScriptedEngine, chat: ChatFormat
) -> None:
    engine.say(said(chat, "12 and 3"))
    answer = await client.responses.create(model=MODEL, input="Say a number.")
    assert answer.output_text == "12 and 3"
    assert answer.status == "completed"
    (recorded,) = client.interactions
    assert recorded.id == answer.id
    assert await client.responses.retrieve(answer.id) == answer
    with fails_with(openai.NotFoundError, code="response_not_found"):
        await client.responses.retrieve("resp_none")
    await client.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(answer.id)
    # It stays a part of its session.
    client.set_reward(answer.id, 1.0)
    assert client.export_interactions()[answer.id].reward == 1.0


async def test_turns_continued_by_a_previous_response_id_are_exact(
    client: EngineOpenAI, engine: ScriptedEngine, chat: ChatFormat
) -> None:
    tools: Any = [ADD]
    engine.say(said(chat, CALL))
    first = await client.responses.create(model=MODEL, input="2 + 3?", tools=tools)
    call = first.output[0]
    assert call.type == "function_call"
    engine.say(said(chat, "It is 5."))
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "5"}]
    second = await client.responses.create(
        model=MODEL, input=output, tools=tools, previous_response_id=first.id
    )
    engine.say(said(chat, "Yes."))
    stream = await client.responses.create(
        model=MODEL,
        input="Sure?",
        tools=tools,
        previous_response_id=second.id,
        stream=True,
    )
    events = [event async for event in stream]
    assert events[-1].type == "response.completed"
    kinds = [i.continuation for i in client.interactions]
    assert kinds == [Continuation.ROOT, Continuation.EXACT, Continuation.EXACT]
    with fails_with(openai.NotFoundError, code="previous_response_not_found"):
        await client.responses.create(model=MODEL, input="x", previous_response_id="resp_other")
