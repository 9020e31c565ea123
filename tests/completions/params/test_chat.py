"""What the parameters of a chat make of its call."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from any_agent.completions.params.sampling import choice_seed
from any_agent.errors import InvalidRequest, UnsupportedParameter
from any_agent.types import GenerationHyperparameters
from tests.support.completions.params import OTHER, RUN, TOOL, USER, parse
from tests.support.errors import fails_with


def test_a_chat_without_parameters_has_the_defaults() -> None:
    call = parse()
    assert (call.model, call.messages, call.tools) == ("policy", USER, None)
    assert (call.stream, call.include_usage, call.logprobs, call.n) == (False, False, False, 1)
    assert (call.overrides, call.recorded, call.template_kwargs) == ({}, {}, {})
    assert (call.forced_call, call.parallel_tool_calls) == (None, True)


def test_train_sessions_sample_as_the_run_says() -> None:
    run = RUN.new(temperature=0.8)
    asked = {"temperature": 0.2, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 7}
    call = parse(run=run, stop="x", max_tokens=7, **asked)
    assert call.gconfig == run.new(max_new_tokens=7, stop=("x",))
    assert call.overrides == asked
    # What agrees with the run, or is off, is no override.
    assert parse(run=run, temperature=0.8, top_p=1, top_k=0, min_p=0).overrides == {}


def test_eval_sessions_sample_as_the_agent_says() -> None:
    run = RUN.new(temperature=0.8)
    asked = {"temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": -7}
    call = parse("eval", run=run, max_tokens=7, **asked)
    assert call.gconfig == GenerationHyperparameters(7, 0.0, 0.5, 3, seed=-7, min_p=0.1)
    assert call.overrides == {}
    # Whoever asks for nothing gets the temperature that evaluations have.
    assert parse("eval", run=run).gconfig == GenerationHyperparameters(100, 0.8)


def test_the_runs_stop_tokens_hold_for_all() -> None:
    run = RUN.new(stop_token_ids=(5,))
    for mode in ("train", "eval"):
        assert parse(mode, run=run, stop_token_ids=[9, 3]).gconfig.stop_token_ids == (3, 5, 9)


def test_tokens_are_the_least_and_more_is_an_override() -> None:
    for asked, limit in (
        ({}, 100),
        ({"max_tokens": 7}, 7),
        ({"max_tokens": 9, "max_completion_tokens": 7}, 7),
        ({"max_tokens": 2**62}, 100),
        ({"max_tokens": None}, 100),
    ):
        for mode in ("train", "eval"):
            assert parse(mode, **asked).gconfig.max_new_tokens == limit
    more = {"max_tokens": RUN.max_new_tokens + 1, "max_completion_tokens": RUN.max_new_tokens + 2}
    assert parse(**more).overrides == more
    assert parse(**more | {"max_tokens": 5}).overrides == {}


OUT_OF_BOUNDS: dict[str, tuple[Any, ...]] = {
    "max_tokens": (0, 2**63, 5.0),
    "n": (0, 129, 1.0),
    "temperature": (2.1, -0.1, "0.5"),
    "top_p": (0,),
    "top_k": (-2,),
    "seed": (2**63, -(2**63) - 1),
    "repetition_penalty": (0,),
    "top_logprobs": (2,),
    "stop": ("", ["x"] * 17, "x" * 513, ["a", ""], "\ud800"),
    "stop_token_ids": ([-1], [True], [2**31]),
    "model": ("\ud800", "x" * 513),
    "reasoning_effort": ("enormous",),
    "chat_template_kwargs": ({"a": "x" * 20_000},),
    "stream_options": ({"include_usage": 1}, []),
    "logit_bias": (
        *({token: 1} for token in ("a", "-1", "²", str(2**31), "9" * 5000)),
        *({"1": bias} for bias in (101, None)),
        {str(k): 1 for k in range(1025)},
    ),
}


@pytest.mark.parametrize("name", OUT_OF_BOUNDS)
def test_values_out_of_bounds_are_refused_by_name(name: str) -> None:
    for value in OUT_OF_BOUNDS[name]:
        with pytest.raises(InvalidRequest) as raised:
            parse("eval", **{name: value})
        assert (raised.value.param or "").split(".")[0] == name
        assert raised.value.status == 400


def test_biases_are_by_token_and_neutral_ones_bend_nothing() -> None:
    call = parse(logit_bias={"7": -100, "5": 1, "6": 0})
    assert call.gconfig.logit_bias == ((5, 1.0), (7, -100.0))
    # What is neutral bends nothing.
    assert parse(logit_bias={"6": 0}).untrainable is None
    call = parse(frequency_penalty=0, presence_penalty=0, repetition_penalty=1, logit_bias={})
    assert (call.untrainable, call.gconfig) == (None, RUN)


def test_top_logprobs_come_with_logprobs() -> None:
    assert parse(logprobs=True).top_logprobs == 0
    call = parse(logprobs=True, top_logprobs=20)
    assert (call.logprobs, call.top_logprobs) == (True, 20)
    assert parse(logprobs=False, top_logprobs=0).top_logprobs == 0


def test_usage_is_the_one_stream_option_with_an_effect() -> None:
    assert parse(stream=True, stream_options={"include_usage": True}).include_usage
    options = {"include_obfuscation": True, "continuous_usage_stats": False, "include_usage": None}
    assert not parse(stream_options=options).include_usage
    for name in ("continuous_usage_stats", "more"):
        with fails_with(UnsupportedParameter, f"stream_options.{name}"):
            parse(stream_options={name: True})


def test_an_effort_has_two_spellings_that_must_agree() -> None:
    for asked in ({"reasoning_effort": "low"}, {"reasoning": {"effort": "low", "enabled": True}}):
        call = parse(**asked)
        assert call.reasoning_effort == "low"
        assert call.recorded == {"reasoning_effort": "low"}
    assert parse(reasoning={"exclude": False}).reasoning_effort is None
    with fails_with(UnsupportedParameter, "chat_template_kwargs"):
        parse(reasoning={"max_tokens": 5})
    with fails_with(InvalidRequest, param="reasoning"):
        parse(reasoning_effort="low", reasoning={"effort": "high"})


def test_each_choice_has_a_seed_of_its_own() -> None:
    seeds = [choice_seed(11, k) for k in range(128)]
    assert seeds[0] == 11
    assert len(set(seeds)) == 128
    assert seeds == [choice_seed(11, k) for k in range(128)]
    assert all(-(2**63) <= s < 2**63 for s in seeds)
    assert not {choice_seed(12, k) for k in range(128)} & set(seeds)


def test_a_tool_choice_forces_a_call_or_hides_the_tools() -> None:
    tools = [TOOL, OTHER]
    for choice in (None, "auto"):
        call = parse(tools=tools, tool_choice=choice)
        assert (call.tools, call.forced_call, call.untrainable) == (tools, None, None)
    assert parse(tools=tools, tool_choice="none").tools is None
    assert parse(tools=[], tool_choice="auto").tools is None
    assert parse(tools=tools, tool_choice="required").forced_call == ""
    # Only one can be meant.
    assert parse(tools=[TOOL], tool_choice="required").forced_call == "f"
    by_name = parse(tools=tools, tool_choice={"type": "function", "function": {"name": "g"}})
    assert (by_name.tools, by_name.forced_call) == (tools, "g")
    assert by_name.untrainable is None
    # A strict one is named as not enforced.
    strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}
    for asked in ({"tools": [OTHER, strict]}, {"functions": [strict["function"]]}):
        assert parse(**asked).ignored == ("tools.strict",)
    assert parse(tools=[strict], tool_choice="none").ignored == ()
    assert parse(tool_choice="auto").forced_call is None
    with fails_with(InvalidRequest, param="tool_choice"):
        parse(tool_choice="required")


def allowed(mode: str, *names: str) -> dict[str, Any]:
    entries = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": entries}}


def test_of_allowed_tools_the_model_is_told_alone() -> None:
    tools = [TOOL, OTHER]
    call = parse(tools=tools, tool_choice=allowed("auto", "g"))
    assert (call.tools, call.forced_call, call.untrainable) == ([OTHER], None, None)
    assert parse(tools=tools, tool_choice=allowed("auto")).tools is None
    assert parse(tools=tools, tool_choice=allowed("required", "g", "f")).forced_call == ""
    assert parse(tools=tools, tool_choice=allowed("required", "g")).forced_call == "g"


def test_a_choice_that_cannot_be_made_is_refused() -> None:
    choices: list[Any] = [
        "sometimes",
        *({"type": "function", "function": {"name": name}} for name in ("h", 5)),
        {"type": "function"},
        {"type": "custom", "custom": {"name": "f"}},
        {},
        *(allowed("auto", "h"), allowed("sometimes", "f"), allowed("required")),
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": "f"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": ["auto"], "tools": ["f"]}},
    ]
    for choice in choices:
        with fails_with(InvalidRequest, param="tool_choice"):
            parse(tools=[TOOL], tool_choice=choice)


def function(name: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def custom(**fields: Any) -> dict[str, Any]:
    return {"type": "custom", "custom": fields}


WRONG_TOOLS: list[Any] = [
    {"a": 1},
    ["f"],
    [{"type": "function"}],
    [{"function": {"name": "f"}}],
    *([function(name)] for name in ("", "x" * 257, "a\nb", "\ud800", ["f"])),
    [function("f", parameters=[])],
    [function("f", description="\ud800")],
    [function("f", description="x" * (1 << 20))],
    [function("f"), function("f")],
    [function(f"f{k}") for k in range(1025)],
    [{"type": "custom"}],
    *([custom(name=name)] for name in (3, "")),
    *([custom(name="f", format={"type": kind})] for kind in ("grammar", "json")),
    [custom(name="f"), function("f")],
]


def test_tools_that_cannot_be_told_are_refused() -> None:
    for wrong in WRONG_TOOLS:
        with fails_with(InvalidRequest, param="tools"):
            parse(tools=wrong)
    names = [function("server.tool/list items"), function("naïve"), function("f", parameters=None)]
    assert parse(tools=names).tools == names


SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "null"}}}


FORMATS: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        {"json_schema": SCHEMA},
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        {"json_object": True},
    ),
    ({"guided_json": SCHEMA}, {"json_schema": SCHEMA}),
    ({"guided_json": json.dumps(SCHEMA)}, {"json_schema": SCHEMA}),
    ({"guided_regex": "a|b"}, {"regex": "a|b"}),
    ({"regex": "a|b"}, {"regex": "a|b"}),
    ({"guided_choice": ["yes", "no. (maybe)"]}, {"regex": r"(yes|no\. \(maybe\))"}),
    ({"structured_outputs": {"choice": ["a"], "regex": None}}, {"regex": "(a)"}),
    ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": SCHEMA}),
    ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
    ({"structured_outputs": {}}, None),
]


def test_a_format_becomes_a_grammar_which_trains_nothing() -> None:
    for asked, grammar in [*FORMATS, ({"guided_json": deep(32)}, {"json_schema": deep(32)})]:
        for mode in ("train", "eval"):
            call = parse(mode, **asked)
            text = None if grammar is None else json.dumps(grammar, separators=(",", ":"))
            assert call.gconfig.grammar == text
            assert call.untrainable == (None if grammar is None else "grammar")


@given(choices=st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=4), other=st.text())
def test_a_guided_choice_matches_its_texts_alone(choices: list[str], other: str) -> None:
    regex = json.loads(parse(guided_choice=choices).gconfig.grammar or "")["regex"]
    assert all(re.fullmatch(regex, choice) for choice in choices)
    assert bool(re.fullmatch(regex, other)) == (other in choices)


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


WRONG_FORMATS: list[dict[str, Any]] = [
    *({"response_format": {"type": kind}} for kind in ("structural_tag", 5, "json_schema")),
    {"response_format": {}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": []}}},
    *({"guided_json": text} for text in ("{", "[" * 100_000, "[]")),
    *({"guided_json": {"title": "\ud800"}}, {"guided_json": {"maximum": 2**70}}),
    {"guided_json": {"description": "x" * (1 << 17)}},
    *({"guided_json": deep(levels)} for levels in (33, 200)),
    *({"guided_choice": []}, {"guided_regex": ""}),
    {"structured_outputs": {"json": SCHEMA, "regex": "a"}},
    {"structured_outputs": {"grammar": "root ::= x"}},
    {"structured_outputs": {"choice": "a"}},
    {"guided_regex": "a", "regex": "a"},
]


def test_formats_that_cannot_be_had_are_refused_by_name() -> None:
    for asked in WRONG_FORMATS:
        with pytest.raises(InvalidRequest) as raised:
            parse(**asked)
        assert (raised.value.param or "").split(".")[0] in asked, asked


def test_a_forced_call_ignores_the_format_and_says_so() -> None:
    form = {"type": "json_object"}
    for choice, grammar, tools in (
        ("auto", True, True),
        ("none", True, False),
        ("required", False, True),
        ({"type": "function", "function": {"name": "f"}}, False, True),
    ):
        call = parse(response_format=form, tools=[TOOL], tool_choice=choice)
        assert (call.gconfig.grammar is not None, bool(call.tools)) == (grammar, tools)
        assert call.untrainable == ("grammar" if grammar else None)
        assert call.ignored == (() if grammar else ("response_format",))
