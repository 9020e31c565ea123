"""The three classes of parameters: honoured, harmless and recorded, refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from any_agent.completions import ChatCall, parse_chat
from any_agent.completions.params import HARMLESS, HONOURED, NEUTRAL
from any_agent.errors import InvalidRequest, UnsupportedParameter
from any_agent.types import GenerationHyperparameters, SessionMode

RUN = GenerationHyperparameters(max_new_tokens=100)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
USER = [{"role": "user", "content": "hi"}]


def parse(mode: str = "train", run: GenerationHyperparameters = RUN, **fields: Any) -> ChatCall:
    body = {"messages": USER, **fields}
    return parse_chat(body, mode=SessionMode(mode), sampling=run, model="policy")


def test_the_classes_do_not_overlap() -> None:
    assert not HONOURED & HARMLESS.keys()
    assert not HONOURED & NEUTRAL.keys()
    assert not HARMLESS.keys() & NEUTRAL.keys()


def test_the_least_that_can_be_asked() -> None:
    call = parse()
    assert (call.model, call.messages, call.tools) == ("policy", USER, None)
    assert (call.stream, call.include_usage, call.logprobs) == (False, False, False)
    assert call.gconfig == RUN
    assert (call.overrides, call.recorded) == ({}, {})


@pytest.mark.parametrize("key", sorted(HARMLESS))
def test_harmless_ones_are_recorded(key: str) -> None:
    value = {dict: {"a": 1}, str: "x", int: 7, bool: True}[HARMLESS[key]]
    assert parse(**{key: value}).recorded == {key: value}
    assert parse(**{key: None}).recorded == {}


@pytest.mark.parametrize("key", sorted(HARMLESS))
def test_harmless_ones_of_another_type_are_refused(key: str) -> None:
    for value in ({"a": 1}, "x", 7, 1.5, True, ["x"]):
        if type(value) is not HARMLESS[key]:
            with pytest.raises(InvalidRequest, match=f"^{key} must be") as raised:
                parse(**{key: value})
            assert raised.value.param == key


@pytest.mark.parametrize("key", sorted(NEUTRAL))
def test_neutral_values_pass_and_others_are_refused(key: str) -> None:
    for value in (*NEUTRAL[key], None):
        assert parse(**{key: value}).gconfig == RUN
    with pytest.raises(UnsupportedParameter, match=key) as raised:
        parse(**{key: {"something": "else"}}, tools=[TOOL])
    assert raised.value.param == key


def test_parallel_calls_mean_nothing_without_tools() -> None:
    assert parse(parallel_tool_calls=False).recorded == {"parallel_tool_calls": False}


def test_a_token_limit_above_the_runs_is_an_override() -> None:
    call = parse(max_tokens=RUN.max_new_tokens + 1)
    assert call.overrides == {"max_new_tokens": RUN.max_new_tokens + 1}
    assert call.gconfig.max_new_tokens == RUN.max_new_tokens


@pytest.mark.parametrize("key", ["best_of", "api_base", "guided_json", "\n" * 500, "x" * 500])
def test_unknown_ones_are_refused_by_name(key: str) -> None:
    with pytest.raises(UnsupportedParameter, match="unknown parameter") as raised:
        parse(**{key: 1})
    assert len(raised.value.message) < 200


def test_train_sessions_sample_as_the_run_says() -> None:
    run = RUN.new(temperature=0.8)
    call = parse(run=run, temperature=0.2, top_p=0.5, top_k=3, stop="x", max_tokens=7)
    assert call.gconfig == run.new(max_new_tokens=7, stop=("x",))
    assert call.overrides == {"temperature": 0.2, "top_p": 0.5, "top_k": 3}
    # What agrees with the run, or is off, is no override.
    assert parse(run=run, temperature=0.8, top_p=1, top_k=0).overrides == {}


def test_eval_sessions_sample_as_the_agent_says() -> None:
    run = RUN.new(temperature=0.8)
    call = parse("eval", run=run, temperature=0, top_p=0.5, top_k=3, max_tokens=7)
    assert call.gconfig == GenerationHyperparameters(7, 0.0, 0.5, 3)
    assert call.overrides == {}
    assert parse("eval", run=run).gconfig.temperature == 1.0


@pytest.mark.parametrize(
    ("asked", "limit"),
    [
        ({}, 100),
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 7}, 7),
        ({"max_tokens": 9, "max_completion_tokens": 7}, 7),
        ({"max_tokens": 1000}, 100),
        ({"max_tokens": None}, 100),
    ],
)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_tokens_are_the_least(mode: str, asked: dict[str, Any], limit: int) -> None:
    assert parse(mode, **asked).gconfig.max_new_tokens == limit


def test_tool_choice() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert parse(tools=tools).tools == tools
    assert parse(tools=tools, tool_choice="auto").tools == tools
    assert parse(tools=tools, tool_choice="none").tools is None
    assert parse(tools=[]).tools is None
    with pytest.raises(UnsupportedParameter) as raised:
        parse(tools=tools, tool_choice="required")
    assert raised.value.param == "tool_choice"


@pytest.mark.parametrize("body", [None, [], "x", 5, True])
def test_a_body_that_is_no_object(body: Any) -> None:
    with pytest.raises(InvalidRequest, match="JSON object"):
        parse_chat(body, mode=SessionMode.TRAIN, sampling=RUN, model="m")
