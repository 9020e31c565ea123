"""OpenAI's Agents SDK, over chat and over Responses, against a live service."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.agent import CALL, TURNS, Agent
from tests.clients.client import Client
from tests.clients.live import Live

HERE = Path(__file__).parent
CLIENTS = (Client("openai-agents", "OpenAI Agents SDK", "openai-agents", HERE / "steps.py"),)
APIS = ("chat", "responses")


@pytest.mark.fills("plain")
def test_plain(live: Live, agent: Agent, api: str) -> None:
    live.says("5.")
    assert agent("plain", api) == {"content": "5.", "requests": 1, "adds up": True}
    assert agent.recorded == {"first": 1}


@pytest.mark.fills("streaming")
def test_stream(live: Live, agent: Agent, api: str) -> None:
    live.says("It is 5.")
    assert agent("stream", api) == {"content": "It is 5.", "streamed": "It is 5."}


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
    said = agent("tools", api)
    assert said["content"] == "It is 5."
    assert said["kinds"] == ["tool_call_item", "tool_call_output_item", "message_output_item"]
    assert said["outputs"] == [5]
    assert agent.recorded == {"first": 1, "exact": 1}


@pytest.mark.fills("streamed tools")
def test_a_tools_round_trip_in_streams(live: Live, agent: Agent, api: str) -> None:
    live.says(f"Well: {CALL}")
    live.says("It is 5.")
    said = agent("tools_streamed", api)
    assert said["content"] == "It is 5."
    assert (
        said["kinds"].count("tool_call_item") == said["kinds"].count("tool_call_output_item") == 1
    )
    assert agent.recorded == {"first": 1, "exact": 1}


@pytest.mark.fills("structured output")
def test_output_of_a_type(live: Live, agent: Agent, api: str) -> None:
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
    assert agent("refused", api) == {"code": "unsupported_parameter"}
    assert agent.recorded == {}
