"""The Claude Agent SDK against a live service."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.agent import CALL, TURNS, Agent
from tests.clients.client import Client
from tests.clients.live import Live

HERE = Path(__file__).parent
CLIENTS = (
    Client(
        "claude-agent",
        "Claude Agent SDK",
        "claude-agent-sdk",
        HERE / "steps.py",
        (
            ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1"),
            ("DISABLE_AUTOUPDATER", "1"),
        ),
    ),
)
APIS = ("messages",)
CALLED = CALL.replace('"add"', '"mcp__sums__add"')


@pytest.mark.fills("plain")
def test_plain(live: Live, agent: Agent, api: str) -> None:
    live.says("5.")
    said = agent("plain")
    assert (said["result"], said["failed"], said["blocks"]) == ("5.", False, ["text"])
    assert said["output_tokens"] == live.tokens("5.")
    assert agent.recorded == {"first": 1}


@pytest.mark.fills("streaming")
def test_stream(live: Live, agent: Agent, api: str) -> None:
    live.says("It is 5.")
    said = agent("stream")
    assert (said["result"], said["streamed"]) == ("It is 5.", "It is 5.")


@pytest.mark.fills("three turns")
def test_three_turns_continue_exactly(live: Live, agent: Agent, api: str) -> None:
    for answer in TURNS:
        live.says(answer)
    assert agent("three_turns")["said"] == TURNS
    assert agent.recorded == {"first": 1, "exact": 2}


@pytest.mark.fills("tools")
def test_a_tools_round_trip(live: Live, agent: Agent, api: str) -> None:
    live.says(CALLED)
    live.says("It is 5.")
    said = agent("tools")
    assert said["calls"] == [["mcp__sums__add", {"a": 2, "b": 3}]]
    assert (said["result"], said["turns"], said["failed"]) == ("It is 5.", 2, False)
    assert agent.recorded == {"first": 1, "exact": 1}


@pytest.mark.fills("streamed tools")
def test_a_tools_round_trip_in_streams(live: Live, agent: Agent, api: str) -> None:
    live.says(f"Well: {CALLED}")
    live.says("It is 5.")
    said = agent("tools_streamed")
    assert said["blocks"] == ["text", "tool_use", "text"]
    assert (said["result"], said["streamed"]) == ("It is 5.", "Well:It is 5.")
    assert agent.recorded == {"first": 1, "exact": 1}


@pytest.mark.fills("reasoning")
def test_thoughts_go_back(live: Live, agent: Agent, api: str) -> None:
    live.says(f"<think>\nIt adds up.\n</think>\n\n{CALLED}")
    live.says("<think>\nSo.\n</think>\n\nIt is 5.")
    said = agent("thinking")
    assert said["blocks"] == ["thinking", "tool_use", "thinking", "text"]
    assert said["result"] == "It is 5."
    assert agent.recorded == {"first": 1, "exact": 1}


@pytest.mark.fills("whole preset")
def test_with_claude_codes_own_prompt_and_tools(live: Live, agent: Agent, api: str) -> None:
    live.says("5.")
    assert agent("whole_preset")["result"] == "5."
    assert agent.recorded == {"first": 1}


@pytest.mark.fills("errors")
def test_refusals(agent: Agent, api: str) -> None:
    said = agent("refused")
    assert said["failed"]
    assert said["result"].startswith("Prompt is too long")
    assert agent.recorded == {}
