"""Chat calls of the direct client, through the SDK's own code."""

from __future__ import annotations

import openai
import pytest

from any_agent import EngineOpenAI
from any_agent.chat import ChatFormat
from any_agent.types import Continuation
from tests.direct.conftest import Make
from tests.direct.lab import HELLO, said
from tests.fakes.scripted_engine import ScriptedEngine


async def test_a_whole_answer(
    client: EngineOpenAI, engine: ScriptedEngine, chat: ChatFormat
) -> None:
    engine.say(said(chat, "12 and 3"))
    completion = await client.chat.completions.create(model="gpt-4o", messages=HELLO)
    assert completion.choices[0].message.content == "12 and 3"
    assert completion.choices[0].finish_reason == "stop"
    assert completion.usage is not None
    (recorded,) = client.interactions
    assert recorded.id == completion.id
    assert completion.usage.completion_tokens == len(recorded.output_ids)
    assert recorded.session_id == client.session_id
