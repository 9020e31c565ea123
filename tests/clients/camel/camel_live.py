"""CAMEL-AI's chat agent against a live service."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.agent import CALL, TURNS, Agent
from tests.clients.client import Client
from tests.clients.live import Live

HERE = Path(__file__).parent
CLIENTS = (Client("camel", "CAMEL-AI", "camel-ai", HERE / "steps.py"),)
APIS = ("chat",)


@pytest.mark.fills("plain")
def test_plain(live: Live, agent: Agent, api: str) -> None:
    live.says("5.")
    assert agent("plain") == {"content": "5.", "finish": ["stop"], "adds up": True}
    assert agent.recorded == {"first": 1}


@pytest.mark.fills("streaming")
def test_stream(live: Live, agent: Agent, api: str) -> None:
    live.says("It is 5.")
    said = agent("stream")
    assert said["content"] == "It is 5."
    assert said["parts"] > 3


@pytest.mark.fills("three turns")
def test_three_turns_continue_exactly(live: Live, agent: Agent, api: str) -> None:
    for answer in TURNS:
        live.says(answer)
    assert agent("three_turns")["said"] == TURNS
    assert agent.recorded == {"first": 1, "exact": 2}


@pytest.mark.fills("tools")
def test_a_tools_round_trip(live: Live, agent: Agent, api: str) -> None:
    live.says(CALL)
    live.says("It is 5.")
    assert agent("tools") == {"name": "add", "result": 5, "content": "It is 5."}
    assert agent.recorded == {"first": 1, "exact": 1}


@pytest.mark.fills("streamed tools")
def test_a_tools_round_trip_in_streams(live: Live, agent: Agent, api: str) -> None:
    live.says(CALL)
    live.says("It is 5.")
    assert agent("tools_streamed") == {"name": "add", "result": 5, "content": "It is 5."}
    assert agent.recorded == {"first": 1, "exact": 1}


@pytest.mark.fills("errors")
def test_refusals(agent: Agent, api: str) -> None:
    said = agent("refused")
    assert "BadRequestError" in said["kinds"]
    assert "suffix" in said["said"]
    assert agent.recorded == {}
