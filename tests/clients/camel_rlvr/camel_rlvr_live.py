"""CAMEL-AI's agents on the direct client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.client import Client, Running, running
from tests.clients.live import Live
from tests.clients.sdks.table import CALL, TURNS

CAMEL = Client("camel-rlvr", "CAMEL-AI", "camel-ai", Path(__file__).with_name("steps.py"))


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(CAMEL, tmp_path_factory.mktemp("camel")) as process:
        yield process


@pytest.fixture
def step(live: Live, process: Running, tiny_model_dir: Path) -> Callable[[str], dict[str, Any]]:
    live.engine.hush()
    variables = {"ENGINE": live.engine.url, "MODEL": str(tiny_model_dir)}
    return lambda name: process.step(name, (), variables)


def test_an_answer_is_recorded_token_by_token(live: Live, step: Any) -> None:
    live.says("5.")
    said = step("plain")
    assert said == {
        "content": "5.",
        "reward": 0.5,
        "trained": live.tokens("5."),
        "model": ["areal"],
    }


def test_three_turns_continue_exactly_and_share_the_reward(live: Live, step: Any) -> None:
    for answer in TURNS:
        live.says(answer)
    said = step("three_turns")
    assert said["said"] == [*TURNS]
    assert said["kinds"] == ["root", "exact", "exact"]
    assert said["rewards"] == pytest.approx([0.81, 0.9, 1.0])
    assert said["rows"] == 1


def test_thoughts_do_not_break_a_conversation(live: Live, step: Any) -> None:
    live.says("<think>\nHm.\n</think>\n\n5.")
    live.says("<think>\nOh.\n</think>\n\n6.")
    said = step("thoughts")
    assert said == {"said": ["5.", "6."], "thought": ["Hm.", "Oh."], "kinds": ["root", "exact"]}


def test_a_tools_round_trip(live: Live, step: Any) -> None:
    live.says(CALL)
    live.says("It is 5.")
    assert step("tools") == {"result": 5, "content": "It is 5.", "kinds": ["root", "exact"]}


def test_a_stream(live: Live, step: Any) -> None:
    live.says("It is 5.")
    said = step("stream")
    assert said["content"] == "It is 5."
    assert said["parts"] > 3
    assert said["recorded"] == 1


def test_a_structured_answer(live: Live, step: Any) -> None:
    live.says('{"total": 5}')
    assert step("structured") == {"total": 5}


def test_tokens_are_the_policys_own(step: Any) -> None:
    assert step("counted") == {"text": "What is 2 and 3?", "around": 4, "in parts": 4}


def test_a_synchronous_step_says_what_to_do(step: Any) -> None:
    assert "astep" in step("synchronous")["said"]


def test_a_client_that_records_nothing_is_refused(step: Any) -> None:
    assert "give an EngineOpenAI" in step("not_recording")["said"]
