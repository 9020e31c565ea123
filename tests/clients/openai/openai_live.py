"""OpenAI's SDK, 2.x and 3.x, against a live service: `make test-clients`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.environment import python_with
from tests.clients.live import Live, live_service, run_step

VERSIONS = {"openai-2": "openai==2.54.0", "openai-3": "openai==3.54.0"}
SCRIPT = Path(__file__).with_name("steps.py")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


@pytest.fixture(scope="session", params=VERSIONS)
def python(request: pytest.FixtureRequest) -> Path:
    return python_with(request.param, VERSIONS[request.param])


@pytest.fixture(scope="session")
def live(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live_service(tiny_model_dir, tmp_path_factory.mktemp("live")) as service:
        yield service


class Agent:
    """One session of an agent that uses this SDK."""

    def __init__(self, live: Live, python: Path) -> None:
        self._live = live
        self._python = python
        self._session = live.open()
        self._before = live.continued()

    def __call__(self, step: str) -> dict[str, Any]:
        base, key = f"{self._live.url}/v1", self._session["api_key"]
        return run_step(self._python, SCRIPT, step, OPENAI_BASE_URL=base, OPENAI_API_KEY=key)

    @property
    def recorded(self) -> dict[str, int]:
        """Its interactions, by how their prompts came about."""
        return dict(self._live.continued() - self._before)


@pytest.fixture
def agent(live: Live, python: Path) -> Agent:
    return Agent(live, python)


def test_plain(live: Live, agent: Agent) -> None:
    live.says("5.")
    said = agent("plain")
    assert (said["content"], said["finish"], said["same id"]) == ("5.", "stop", True)
    usage = said["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert agent.recorded == {"first": 1}


def test_stream(live: Live, agent: Agent) -> None:
    live.says("It is 5.")
    said = agent("stream")
    assert (said["content"], said["finish"]) == ("It is 5.", "stop")
    assert said["completion_tokens"] == len(live.chat.tokenizer.encode("It is 5.")) + 1


def test_the_sdks_own_accumulation(live: Live, agent: Agent) -> None:
    live.says(f"So: {CALL}")
    said = agent("helper")
    assert (said["content"], said["finish"]) == ("So:", "tool_calls")
    assert said["calls"] == [["add", '{"a": 2, "b": 3}']]
    assert "tool_calls.function.arguments.delta" in said["kinds"]


def test_three_turns_continue_exactly(live: Live, agent: Agent) -> None:
    answers = ["5.", "6, I say.", "7"]
    for answer in answers:
        live.says(answer)
    assert agent("three_turns")["said"] == answers
    assert agent.recorded == {"first": 1, "exact": 2}


def test_a_tools_round_trip(live: Live, agent: Agent) -> None:
    live.says(CALL)
    live.says("It is 5.")
    said = agent("tools")
    assert said == {"finish": "tool_calls", "name": "add", "result": "5", "content": "It is 5."}
    assert agent.recorded == {"first": 1, "exact": 1}


def test_a_streamed_call(live: Live, agent: Agent) -> None:
    live.says(CALL)
    said = agent("tools_streamed")
    (call,) = said["calls"]
    assert (said["finish"], call["name"]) == ("tool_calls", "add")
    assert call["arguments"] == '{"a": 2, "b": 3}'
    assert call["id"].startswith("call_")
    assert said["parts"] > 3


def test_choices_with_logprobs(live: Live, agent: Agent) -> None:
    live.says("5.")
    live.says("It is 6.")
    said = agent("choices")
    assert said["indices"] == [0, 1]
    assert sorted(said["said"]) == ["5.", "It is 6."]
    assert sum(said["tokens"]) == said["completion_tokens"]
    assert said["top"] == [2, 2]
    assert agent.recorded == {"first": 2}


def test_legacy_completions(live: Live, agent: Agent) -> None:
    live.says(" 5.")
    live.says(" 5!")
    said = agent("legacy")
    assert (said["text"], said["streamed"]) == (" 5.", " 5!")
    assert said["tokens"] == len(live.chat.tokenizer.encode(" 5.")) + 1


def test_refusals(agent: Agent) -> None:
    assert agent("refused") == {
        "long": "context_length_exceeded",
        "image": "invalid_request",
        "unknown": "unsupported_parameter",
    }
    assert agent.recorded == {}
