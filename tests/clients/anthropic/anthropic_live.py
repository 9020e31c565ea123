"""Anthropic's SDK against a live service."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.agent import CALL, TURNS, Agent
from tests.clients.client import Client
from tests.clients.live import Live

HERE = Path(__file__).parent
CLIENTS = (Client("anthropic", "anthropic", "anthropic", HERE / "steps.py"),)
APIS = ("messages",)


@pytest.mark.fills("plain")
def test_plain(live: Live, agent: Agent, api: str) -> None:
    live.says("5.")
    assert agent("plain") == {
        "content": [{"type": "text", "text": "5."}],
        "stop": "end_turn",
        "output_tokens": live.tokens("5."),
        "same id": True,
    }
    assert agent.recorded == {"first": 1}


@pytest.mark.fills("streaming")
def test_stream(live: Live, agent: Agent, api: str) -> None:
    live.says("It is 5.")
    said = agent("stream")
    assert (said["content"], said["stop"]) == ("It is 5.", "end_turn")
    assert said["output_tokens"] == live.tokens("It is 5.")
    assert said["kinds"][:2] == ["message_start", "content_block_start"]
    assert said["kinds"].count("content_block_delta") > 2
    assert said["kinds"][-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert agent.recorded == {"first": 1}


@pytest.mark.fills("accumulation")
def test_the_sdks_own_accumulation(live: Live, agent: Agent, api: str) -> None:
    live.says(f"So: {CALL}")
    assert agent("helper") == {
        "streamed": "So:",
        "content": [
            {"type": "text", "text": "So:"},
            {"type": "tool_use", "name": "add", "input": {"a": 2, "b": 3}},
        ],
        "stop": "tool_use",
    }


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
    said = agent("tools")
    assert said.pop("input") == {"a": 2, "b": 3}
    assert said == {"stop": "tool_use", "name": "add", "content": "It is 5."}
    assert agent.recorded == {"first": 1, "exact": 1}


@pytest.mark.fills("tools")
def test_the_sdks_own_loop(live: Live, agent: Agent, api: str) -> None:
    live.says(f"Well: {CALL}")
    live.says("It is 5.")
    said = agent("runner")
    assert said["turns"] == [["text", "tool_use"], ["text"]]
    assert said["last"] == [{"type": "text", "text": "It is 5."}]
    assert agent.recorded == {"first": 1, "exact": 1}


@pytest.mark.fills("streamed tools")
def test_a_tools_round_trip_in_a_stream(live: Live, agent: Agent, api: str) -> None:
    live.says(f"Well: {CALL}")
    live.says("It is 5.")
    said = agent("tools_streamed")
    assert (said["name"], said["input"], said["content"]) == ("add", {"a": 2, "b": 3}, "It is 5.")
    assert agent.recorded == {"first": 1, "exact": 1}


@pytest.mark.fills("reasoning")
def test_thoughts_go_back(live: Live, agent: Agent, api: str) -> None:
    live.says(f"<think>\nIt adds up.\n</think>\n\n{CALL}")
    live.says("<think>\nSo.\n</think>\n\nIt is 5.")
    assert agent("thinking") == {
        "kinds": ["thinking", "tool_use"],
        "thoughts": "It adds up.",
        "content": "It is 5.",
    }
    assert agent.recorded == {"first": 1, "exact": 1}


@pytest.mark.fills("token counts")
def test_tokens_are_counted(live: Live, agent: Agent, api: str) -> None:
    live.says("5.")
    assert agent("counted") == {"equal": True}
    assert agent.recorded == {"first": 1}


@pytest.mark.fills("stops")
def test_what_ended_an_answer(live: Live, agent: Agent, api: str) -> None:
    live.says("It is so.")
    live.says("It is so.")
    said = agent("stopped")
    assert said["stop"] == ["stop_sequence", "so"]
    assert (said["content"], said["short"]) == ("It is ", "max_tokens")


@pytest.mark.fills("structured output")
def test_output_of_a_schema(live: Live, agent: Agent, api: str) -> None:
    live.says('{"total": 5}')
    assert agent("structured") == {"total": 5}


@pytest.mark.fills("errors")
def test_refusals(agent: Agent, api: str) -> None:
    assert agent("refused") == {
        "long": ["invalid_request_error", "context_length_exceeded"],
        "image": ["invalid_request_error", "invalid_request"],
        "unknown": ["invalid_request_error", "unsupported_parameter"],
    }
    assert agent.recorded == {}
