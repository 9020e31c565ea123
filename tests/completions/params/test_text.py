"""What the parameters of a legacy completion make of its call."""

from __future__ import annotations

from typing import Any

import pytest

from any_agent.completions.params.parameter import MAX_PROMPT_IDS
from any_agent.errors import ContextLengthExceeded, InvalidRequest, UnsupportedParameter
from tests.support.completions.params import RUN, parse
from tests.support.errors import fails_with


def text(mode: str = "train", **fields: Any) -> Any:
    return parse(mode, api="completions", **fields)


def test_the_least_that_can_be_asked() -> None:
    call = text()
    assert (call.prompts, call.messages, call.tools) == (("hi",), [], None)
    # As OpenAI's API has it.
    assert call.gconfig == RUN.new(max_new_tokens=16)
    assert (call.n, call.logprobs, call.top_logprobs, call.echo) == (1, False, 0, False)
    assert (call.overrides, call.untrainable) == ({}, None)


def test_the_default_of_tokens_is_within_the_runs() -> None:
    assert text(run=RUN.new(max_new_tokens=5)).gconfig.max_new_tokens == 5
    assert text(max_tokens=50).gconfig.max_new_tokens == 50


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
        (["a", [3]], ("a", (3,))),
    ],
)
def test_a_prompt_is_a_text_or_ids_or_several_of_them(prompt: Any, prompts: Any) -> None:
    assert text(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        "",
        [],
        [""],
        [[]],
        5,
        {},
        [1, "a"],
        [1.0],
        [True],
        [-1],
        [2**31],
        [[1], 2],
        [[[1]]],
        [None],
        "\ud800",
        ["a"] * 129,
    ],
    ids=lambda prompt: str(prompt)[:40],
)
def test_prompts_that_are_none(prompt: Any) -> None:
    with fails_with(InvalidRequest, param="prompt"):
        text(prompt=prompt)


def test_a_prompt_that_no_context_holds() -> None:
    assert len(text(prompt=[5] * 100_000).prompts[0]) == 100_000
    with pytest.raises(ContextLengthExceeded):
        text(prompt=[5] * (MAX_PROMPT_IDS + 1))


def test_logprobs_is_a_number_of_alternatives() -> None:
    for asked in (0, 5):
        call = text(logprobs=asked)
        assert (call.logprobs, call.top_logprobs) == (True, asked)
    with fails_with(InvalidRequest, "0 to 20", param="logprobs"):
        text(logprobs=True)


def test_echo_is_taken_without_logprobs() -> None:
    assert text(echo=True).echo
    with fails_with(UnsupportedParameter, param="echo"):
        text(echo=True, logprobs=0)


def test_choices_are_bounded_and_none_is_discarded() -> None:
    assert text(n=3, best_of=3).n == 3
    assert text(best_of=1).n == 1
    with fails_with(UnsupportedParameter, param="best_of"):
        text(n=2, best_of=3)
    assert text(n=64, prompt=["a", "b"]).n == 64
    with fails_with(InvalidRequest, param="n"):
        text(n=65, prompt=["a", "b"])


def test_a_regex_becomes_a_grammar_which_trains_nothing() -> None:
    call = text(guided_regex="a+")
    assert (call.gconfig.grammar, call.untrainable) == ('{"regex":"a+"}', "grammar")
