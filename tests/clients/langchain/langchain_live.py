"""LangChain's chat models of OpenAI and Anthropic against a live service."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.agent import CALL, TURNS, Agent
from tests.clients.client import Client
from tests.clients.live import Live

HERE = Path(__file__).parent
CLIENTS = (Client("langchain", "LangChain", "langchain-core", HERE / "steps.py"),)
APIS = ("chat", "responses", "messages")


@pytest.mark.fills("plain")
def test_plain(live: Live, agent: Agent, api: str) -> None:
    live.says("5.")
    assert agent("plain", api) == {"content": "5.", "adds up": True}
    assert agent.recorded == {"first": 1}


@pytest.mark.fills("streaming", "accumulation")
def test_stream(live: Live, agent: Agent, api: str) -> None:
    live.says("It is 5.")
    tokens = len(live.chat.tokenizer.encode("It is 5.")) + 1
    said = agent("stream", api)
    assert said == {"content": "It is 5.", "streamed": "It is 5.", "output_tokens": tokens}


@pytest.mark.fills("three turns")
def test_three_turns_continue_exactly(live: Live, agent: Agent, api: str) -> None:
    for answer in TURNS:
        live.says(answer)
    assert agent("three_turns", api)["said"] == TURNS
    assert agent.recorded == {"first": 1, "exact": 2}


@pytest.mark.fills("tools")
def test_a_tools_round_trip(live: Live, agent: Agent, api: str) -> None:
    live.says(CALL)
    live.says("It is 5.")
    assert agent("tools", api) == {"name": "add", "result": "5", "content": "It is 5."}
    assert agent.recorded == {"first": 1, "exact": 1}


@pytest.mark.fills("streamed tools")
def test_a_tools_round_trip_in_streams(live: Live, agent: Agent, api: str) -> None:
    live.says(f"Well: {CALL}")
    live.says("It is 5.")
    assert agent("tools_streamed", api) == {"name": "add", "result": "5", "content": "It is 5."}
    assert agent.recorded == {"first": 1, "exact": 1}


@pytest.mark.fills("structured output")
def test_structured_output(live: Live, agent: Agent, api: str) -> None:
    live.says('{"total": 5}')
    assert agent("structured", api) == {"total": 5}


@pytest.mark.fills("previous answer", api="responses")
def test_turns_that_name_the_one_before(live: Live, agent: Agent) -> None:
    for answer in TURNS:
        live.says(answer)
    assert agent("previous")["said"] == TURNS
    assert agent.recorded == {"first": 1, "exact": 2}


@pytest.mark.fills("errors")
def test_refusals(agent: Agent, api: str) -> None:
    said = agent("refused", api)
    assert "BadRequestError" in said["kinds"]
    assert "suffix" in said["said"]
    assert agent.recorded == {}
