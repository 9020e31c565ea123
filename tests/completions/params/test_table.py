"""The table: every parameter of OpenAI's API has a row, and every row does what it says."""

from __future__ import annotations

import re
from typing import Any, get_type_hints

import pytest
from anthropic.types import message_create_params
from anthropic.types.beta import message_create_params as beta_message_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from any_agent.completions.params.parameter import Parameter
from any_agent.completions.params.table import PARAMETERS, TABLE
from any_agent.completions.untrainable import REASONS
from any_agent.errors import InvalidRequest, NotFound, UnsupportedParameter
from tests.support.completions.params import BODIES, RUN, parse
from tests.support.errors import fails_with

ROWS = [(api, row) for row in PARAMETERS for api in row.apis]
HARMLESS = [each for each in ROWS if each[1].kind == "harmless"]
REFUSED = [each for each in ROWS if each[1].kind == "refused"]
HEADERS = {"betas", "workspace_id"}
"""Anthropic's SDK sends them as such."""
HONOURED = [each for each in ROWS if each[1].kind == "honoured"]
STRANGE: tuple[Any, ...] = ({"a": 1}, "x", 7, -1.5, True, ["x"], [[]], 10**400, float("nan"))


def named(each: tuple[str, Parameter]) -> str:
    return f"{each[0]}-{each[1].name}"


@pytest.mark.parametrize(
    ("api", "kind"),
    [
        ("chat", chat_create_params.CompletionCreateParamsBase),
        ("completions", completion_create_params.CompletionCreateParamsBase),
        ("responses", response_create_params.ResponseCreateParamsBase),
        ("messages", message_create_params.MessageCreateParamsBase),
        ("messages", beta_message_create_params.MessageCreateParamsBase),
    ],
)
def test_every_parameter_of_the_installed_sdk_has_a_row(api: str, kind: Any) -> None:
    names = set(get_type_hints(kind)) - HEADERS | {"stream"}
    assert len(names) > 15
    assert not names - TABLE[api].keys()


def test_a_name_has_one_row_for_a_route() -> None:
    assert sum(len(row.apis) for row in PARAMETERS) == sum(map(len, TABLE.values()))


@pytest.mark.parametrize("each", ROWS, ids=map(named, ROWS))
def test_null_is_as_if_it_were_left_out(each: tuple[str, Parameter]) -> None:
    api, row = each
    if row.name not in BODIES[api]:
        assert parse(api=api, **{row.name: None}) == parse(api=api)


@pytest.mark.parametrize("each", HARMLESS, ids=map(named, HARMLESS))
def test_harmless_parameters_are_recorded_and_change_nothing(each: tuple[str, Parameter]) -> None:
    api, row = each
    value = {"object": {"a": 1}, "string": "x", "integer": 7, "boolean": True, "array": ["x"]}[
        row.schema["type"]
    ]
    call = parse(api=api, **{row.name: value})
    assert call.recorded == {row.name: value}
    assert (call.gconfig, call.untrainable) == (parse(api=api).gconfig, None)


@pytest.mark.parametrize("each", HARMLESS + HONOURED, ids=map(named, HARMLESS + HONOURED))
def test_what_has_no_valid_form_is_refused_by_name(each: tuple[str, Parameter]) -> None:
    """Whatever it is: a value is taken, or the error names the parameter."""
    api, row = each
    refused = 0
    for value in STRANGE:
        try:
            parse(api=api, **{row.name: value})
        except (InvalidRequest, NotFound) as error:
            refused += 1
            assert re.split(r"[.\[]", error.param or "")[0] == row.name
            assert row.name in error.message
            assert len(error.message) < 400
    assert refused >= 4


@pytest.mark.parametrize("each", REFUSED, ids=map(named, REFUSED))
def test_a_refused_parameter_passes_with_the_value_that_holds_anyway(
    each: tuple[str, Parameter],
) -> None:
    api, row = each
    for value in row.schema.get("enum", ()):
        call = parse(api=api, **{row.name: value})
        assert (call.gconfig, call.recorded) == (parse(api=api).gconfig, {row.name: value})
    for value in STRANGE:
        if value is not True and value != 7:
            with fails_with(UnsupportedParameter, row.name, param=row.name) as raised:
                parse(api=api, **{row.name: value})
            assert row.meaning in raised.value.message


BENDING: dict[str, Any] = {
    "temperature": 0,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.1,
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1},
    "response_format": {"type": "json_object"},
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "guided_choice": ["yes", "no"],
    "structured_outputs": {"regex": "a+"},
    "regex": "a+",
}
FORMAT = {"type": "json_schema", "schema": {"type": "object"}}
BENDING_MESSAGES: dict[str, Any] = {
    "output_config": {"format": FORMAT},
    "output_format": FORMAT,
}
BENDING_RESPONSES: dict[str, Any] = {"text": {"format": {"type": "json_object"}}}


@pytest.mark.parametrize("each", HONOURED, ids=map(named, HONOURED))
def test_what_bends_the_distribution_is_untrainable(each: tuple[str, Parameter]) -> None:
    api, row = each
    others = {"messages": BENDING_MESSAGES, "responses": BENDING_RESPONSES}
    bending = BENDING | others.get(api, {})
    assert (row.untrainable is not None) == (row.name in bending)
    if row.untrainable is None:
        return
    assert row.untrainable in REASONS
    fields = {row.name: bending[row.name]}
    assert parse("eval", api=api, **fields).untrainable == row.untrainable
    trained = parse("train", api=api, **fields)
    if row.train:
        assert (trained.untrainable, trained.overrides) == (None, fields)
        assert trained.gconfig == parse("train", api=api).gconfig
    else:
        assert (trained.untrainable, trained.overrides) == (row.untrainable, {})


def test_unknown_parameters_are_refused_by_name_with_a_hint() -> None:
    for key in ("beam_width", "api_base", "\n" * 500, "x" * 500):
        with pytest.raises(UnsupportedParameter) as raised:
            parse(told={"unknown": "refuse"}, **{key: 1})
        assert len(raised.value.message) < 200
        assert raised.value.param and raised.value.param.isprintable()
    with fails_with(UnsupportedParameter, "max_tokens", param="max_token"):
        parse(told={"unknown": "refuse"}, max_token=1)


@pytest.mark.parametrize("api", BODIES)
def test_a_body_that_is_no_object_is_refused(api: str) -> None:
    for body in (None, [], "x", 5, True):
        with fails_with(InvalidRequest, "JSON object"):
            parse(api=api, body=body)


def test_what_is_recorded_is_bounded() -> None:
    assert parse(metadata={"a": "x" * 1000}).recorded
    for asked in ({"metadata": {"a": "x" * 100_000}}, {"user": "x" * 100_000}):
        with fails_with(InvalidRequest, param=next(iter(asked))):
            parse(**asked)
    with fails_with(InvalidRequest, param="metadata"):
        parse(metadata={"a": "\ud800"})
    assert (parse().gconfig, parse().untrainable) == (RUN, None), "the run itself bends nothing"
