"""OpenAI's SDK, 2.x and 3.x, against a live service: `make verify SUITES=clients`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.agent import CALL, TURNS, Agent
from tests.clients.client import Client
from tests.clients.live import Live

HERE = Path(__file__).parent
CLIENTS = tuple(
    Client(f"openai-{major}", "openai", "openai", HERE / "steps.py") for major in (2, 3)
)


@pytest.mark.fills("plain", api="chat")
def test_plain(live: Live, agent: Agent) -> None:
    live.says("5.")
    said = agent("plain")
    assert (said["content"], said["finish"], said["same id"]) == ("5.", "stop", True)
    usage = said["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert agent.recorded == {"first": 1}


@pytest.mark.fills("streaming", api="chat")
def test_stream(live: Live, agent: Agent) -> None:
    live.says("It is 5.")
    said = agent("stream")
    assert (said["content"], said["finish"]) == ("It is 5.", "stop")
    assert said["completion_tokens"] == len(live.chat.tokenizer.encode("It is 5.")) + 1


@pytest.mark.fills("accumulation", api="chat")
def test_the_sdks_own_accumulation(live: Live, agent: Agent) -> None:
    live.says(f"So: {CALL}")
    said = agent("helper")
    assert (said["content"], said["finish"]) == ("So:", "tool_calls")
    assert said["calls"] == [["add", '{"a": 2, "b": 3}']]
    assert "tool_calls.function.arguments.delta" in said["kinds"]


@pytest.mark.fills("three turns", api="chat")
def test_three_turns_continue_exactly(live: Live, agent: Agent) -> None:
    for answer in TURNS:
        live.says(answer)
    assert agent("three_turns")["said"] == TURNS
    assert agent.recorded == {"first": 1, "exact": 2}


@pytest.mark.fills("tools", api="chat")
def test_a_tools_round_trip(live: Live, agent: Agent) -> None:
    live.says(CALL)
    live.says("It is 5.")
    said = agent("tools")
    assert said == {"finish": "tool_calls", "name": "add", "result": "5", "content": "It is 5."}
    assert agent.recorded == {"first": 1, "exact": 1}


@pytest.mark.fills("streamed tools", api="chat")
def test_a_streamed_call(live: Live, agent: Agent) -> None:
    live.says(CALL)
    said = agent("tools_streamed")
    (call,) = said["calls"]
    assert (said["finish"], call["name"]) == ("tool_calls", "add")
    assert call["arguments"] == '{"a": 2, "b": 3}'
    assert call["id"].startswith("call_")
    assert said["parts"] > 3


@pytest.mark.fills("choices", api="chat")
def test_choices_with_logprobs(live: Live, agent: Agent) -> None:
    live.says("5.")
    live.says("It is 6.")
    said = agent("choices")
    assert said["indices"] == [0, 1]
    assert sorted(said["said"]) == ["5.", "It is 6."]
    assert sum(said["tokens"]) == said["completion_tokens"]
    assert said["top"] == [2, 2]
    assert agent.recorded == {"first": 2}


@pytest.mark.fills("plain", "streaming", api="completions")
def test_legacy_completions(live: Live, agent: Agent) -> None:
    live.says(" 5.")
    live.says(" 5!")
    said = agent("legacy")
    assert (said["text"], said["streamed"]) == (" 5.", " 5!")
    assert said["tokens"] == len(live.chat.tokenizer.encode(" 5.")) + 1


@pytest.mark.fills("errors", api="chat")
def test_refusals(agent: Agent) -> None:
    assert agent("refused") == {
        "long": "context_length_exceeded",
        "image": "invalid_request",
        "unknown": "unsupported_parameter",
    }
    assert agent.recorded == {}
