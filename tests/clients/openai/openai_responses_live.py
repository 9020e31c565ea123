"""OpenAI's SDK, 2.x and 3.x, over Responses against a live service."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.agent import CALL, TURNS, Agent
from tests.clients.client import Client
from tests.clients.live import Live

STEPS = Path(__file__).with_name("responses_steps.py")
CLIENTS = tuple(Client(f"openai-{major}", "openai", "openai", STEPS) for major in (2, 3))
APIS = ("responses",)


@pytest.mark.fills("plain")
def test_plain(live: Live, agent: Agent, api: str) -> None:
    live.says("5.")
    assert agent("plain") == {
        "content": "5.",
        "status": "completed",
        "output_tokens": live.tokens("5."),
        "adds up": True,
        "same id": True,
    }
    assert agent.recorded == {"first": 1}


@pytest.mark.fills("streaming")
def test_stream(live: Live, agent: Agent, api: str) -> None:
    live.says("It is 5.")
    said = agent("stream")
    assert (said["content"], said["in order"]) == ("It is 5.", True)
    assert said["output_tokens"] == live.tokens("It is 5.")
    assert said["kinds"][:2] == ["response.created", "response.in_progress"]
    assert said["kinds"].count("response.output_text.delta") > 2
    assert said["kinds"][-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert agent.recorded == {"first": 1}


@pytest.mark.fills("accumulation")
def test_the_sdks_own_accumulation(live: Live, agent: Agent, api: str) -> None:
    live.says(f"So: {CALL}")
    assert agent("helper") == {
        "streamed": "So:",
        "content": "So:",
        "status": "completed",
        "calls": [["add", '{"a": 2, "b": 3}']],
        "as kept": True,
    }


@pytest.mark.fills("three turns")
def test_three_turns_continue_exactly(live: Live, agent: Agent, api: str) -> None:
    for answer in TURNS:
        live.says(answer)
    assert agent("three_turns")["said"] == TURNS
    assert agent.recorded == {"first": 1, "exact": 2}


@pytest.mark.fills("previous answer")
def test_turns_that_name_the_one_before(live: Live, agent: Agent, api: str) -> None:
    for answer in TURNS:
        live.says(answer)
    assert agent("previous")["said"] == TURNS
    assert agent.recorded == {"first": 1, "exact": 2}


@pytest.mark.fills("tools")
def test_a_tools_round_trip(live: Live, agent: Agent, api: str) -> None:
    live.says(CALL)
    live.says("It is 5.")
    said = agent("tools")
    assert said == {"name": "add", "arguments": '{"a": 2, "b": 3}', "content": "It is 5."}
    assert agent.recorded == {"first": 1, "exact": 1}


@pytest.mark.fills("streamed tools")
def test_a_tools_round_trip_in_a_stream(live: Live, agent: Agent, api: str) -> None:
    live.says(f"Well: {CALL}")
    live.says("It is 5.")
    said = agent("tools_streamed")
    assert said["in parts"]
    assert (said["name"], said["content"]) == ("add", "It is 5.")
    assert agent.recorded == {"first": 1, "exact": 1}


@pytest.mark.fills("reasoning")
def test_thoughts_go_back(live: Live, agent: Agent, api: str) -> None:
    live.says(f"<think>\nIt adds up.\n</think>\n\n{CALL}")
    live.says("<think>\nSo.\n</think>\n\nIt is 5.")
    assert agent("thinking") == {
        "kinds": ["reasoning", "function_call"],
        "thoughts": "It adds up.",
        "content": "It is 5.",
    }
    assert agent.recorded == {"first": 1, "exact": 1}


@pytest.mark.fills("structured output")
def test_output_of_a_type(live: Live, agent: Agent, api: str) -> None:
    live.says('{"total": 5}')
    assert agent("structured") == {"total": 5}


@pytest.mark.fills("stops")
def test_what_ended_an_answer(live: Live, agent: Agent, api: str) -> None:
    live.says("so " * 30)
    assert agent("stopped") == {"status": "incomplete", "reason": "max_output_tokens"}


@pytest.mark.fills("errors")
def test_refusals(agent: Agent, api: str) -> None:
    assert agent("refused") == {
        "long": "context_length_exceeded",
        "image": "invalid_request",
        "tool": "unsupported_parameter",
        "unknown": "unsupported_parameter",
        "previous": "previous_response_not_found",
    }
    assert agent.recorded == {}
