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


def test_a_completion_without_parameters_has_openais_defaults() -> None:
    call = text()
    assert (call.prompts, call.messages, call.tools) == (("hi",), [], None)
    # As OpenAI's API has it.
    assert call.gconfig == RUN.new(max_new_tokens=16)
    assert (call.n, call.logprobs, call.top_logprobs, call.echo) == (1, False, 0, False)
    assert (call.overrides, call.untrainable) == ({}, None)
    assert text(run=RUN.new(max_new_tokens=5)).gconfig.max_new_tokens == 5
    assert text(max_tokens=50).gconfig.max_new_tokens == 50


def test_a_prompt_is_a_text_or_ids_or_several_of_them() -> None:
    for prompt, prompts in (
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
        (["a", [3]], ("a", (3,))),
    ):
        assert text(prompt=prompt).prompts == prompts
    nothing: list[Any] = [None, "", [], [""], [[]], 5, {}, [1, "a"], [1.0], [True], [-1], [2**31]]
    for prompt in [*nothing, [[1], 2], [[[1]]], [None], "\ud800", ["a"] * 129]:
        with fails_with(InvalidRequest, param="prompt"):
            text(prompt=prompt)


def test_a_prompt_that_no_context_holds_is_refused() -> None:
    assert len(text(prompt=[5] * 100_000).prompts[0]) == 100_000
    with pytest.raises(ContextLengthExceeded):
        text(prompt=[5] * (MAX_PROMPT_IDS + 1))


def test_logprobs_is_a_number_of_alternatives() -> None:
    for asked in (0, 5):
        call = text(logprobs=asked)
        assert (call.logprobs, call.top_logprobs) == (True, asked)
    with fails_with(InvalidRequest, "0 to 20", param="logprobs"):
        text(logprobs=True)
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
