"""npm's openai against a live service."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.agent import CALL, TURNS, Agent
from tests.clients.client import Client
from tests.clients.live import Live

HERE = Path(__file__).parent
CLIENTS = (Client("openai-npm", "openai", "openai", HERE / "steps.mjs"),)
APIS = ("chat", "responses")
ENDS = {"chat": ("stop", "tool_calls"), "responses": ("completed", "completed")}


@pytest.mark.fills("plain")
def test_plain(live: Live, agent: Agent, api: str) -> None:
    live.says("5.")
    tokens = live.tokens("5.")
    assert agent("plain", api) == {"content": "5.", "finish": ENDS[api][0], "tokens": tokens}
    assert agent.recorded == {"first": 1}


@pytest.mark.fills("streaming")
def test_stream(live: Live, agent: Agent, api: str) -> None:
    live.says("It is 5.")
    said = agent("stream", api)
    assert said.pop("parts") > 2
    assert said == {"content": "It is 5.", "tokens": live.tokens("It is 5.")}
    assert agent.recorded == {"first": 1}


@pytest.mark.fills("accumulation")
def test_the_sdks_own_accumulation(live: Live, agent: Agent, api: str) -> None:
    live.says(f"So: {CALL}")
    assert agent("helper", api) == {
        "content": "So:",
        "finish": ENDS[api][1],
        "calls": [["add", '{"a": 2, "b": 3}']],
    }


@pytest.mark.fills("three turns")
def test_three_turns_continue_exactly(live: Live, agent: Agent, api: str) -> None:
    for answer in TURNS:
        live.says(answer)
    assert agent("threeTurns", api)["said"] == TURNS
    assert agent.recorded == {"first": 1, "exact": 2}


@pytest.mark.fills("tools")
def test_a_tools_round_trip(live: Live, agent: Agent, api: str) -> None:
    live.says(CALL)
    live.says("It is 5.")
    assert agent("tools", api) == {"name": "add", "result": "5", "content": "It is 5."}
    assert agent.recorded == {"first": 1, "exact": 1}


@pytest.mark.fills("streamed tools")
def test_a_tools_round_trip_in_a_stream(live: Live, agent: Agent, api: str) -> None:
    live.says(f"Well: {CALL}")
    live.says("It is 5.")
    assert agent("toolsStreamed", api) == {"name": "add", "result": "5", "content": "It is 5."}
    assert agent.recorded == {"first": 1, "exact": 1}


@pytest.mark.fills("previous answer", api="responses")
def test_turns_that_name_the_one_before(live: Live, agent: Agent) -> None:
    for answer in TURNS:
        live.says(answer)
    assert agent("previous")["said"] == TURNS
    assert agent.recorded == {"first": 1, "exact": 2}


@pytest.mark.fills("plain", "streaming", api="completions")
def test_legacy_completions(live: Live, agent: Agent) -> None:
    live.says(" 5.")
    live.says(" 5!")
    assert agent("legacy") == {"text": " 5.", "streamed": " 5!"}


@pytest.mark.fills("errors")
def test_refusals(agent: Agent, api: str) -> None:
    assert agent("refused", api) == {"bad": True, "code": "unsupported_parameter"}
    assert agent.recorded == {}
