"""Which completions are never trained on, and why."""

from __future__ import annotations

from typing import Any

import pytest

from any_agent.completions.untrainable import has_modified_distribution, untrainable_reason
from any_agent.types import GenerationHyperparameters

PLAIN = GenerationHyperparameters(temperature=0.7, stop=("x",), stop_token_ids=(1,), seed=5)
BENT: list[tuple[dict[str, Any], str]] = [
    ({"grammar": "{}"}, "grammar"),
    ({"logit_bias": ((1, 1.0),)}, "logit_bias"),
    ({"frequency_penalty": 0.1}, "penalty"),
    ({"presence_penalty": -0.1}, "penalty"),
    ({"repetition_penalty": 0.9}, "penalty"),
    ({"min_p": 0.1}, "min_p"),
    ({"temperature": 0.0}, "truncated_sampling"),
    ({"top_p": 0.9}, "truncated_sampling"),
    ({"top_k": 1}, "truncated_sampling"),
]


@pytest.mark.parametrize(("changes", "reason"), BENT, ids=str)
def test_a_setting_that_bends_the_distribution_makes_a_call_untrainable(
    changes: dict[str, Any], reason: str
) -> None:
    gconfig = PLAIN.new(**changes)
    assert has_modified_distribution(gconfig) == reason
    assert untrainable_reason(gconfig, [1]) == reason


def test_a_plain_sample_is_trained_on_unless_it_is_empty() -> None:
    assert has_modified_distribution(PLAIN) is None
    assert untrainable_reason(PLAIN, [1]) is None
    assert untrainable_reason(PLAIN, []) == "no_tokens"


def test_under_a_grammar_the_tokens_that_it_left_free_are_trained_on() -> None:
    bound = PLAIN.new(grammar="{}")
    assert untrainable_reason(bound, [1, 2], [True, False]) is None
    assert untrainable_reason(bound, [1, 2], [False, False]) is None
    assert untrainable_reason(bound, [1, 2], [True, True]) == "grammar"
    assert untrainable_reason(bound, [1, 2], [False]) == "grammar", "not told of every token"
    assert untrainable_reason(bound.new(top_p=0.5), [1], [False]) == "truncated_sampling"
    assert untrainable_reason(bound, [], []) == "no_tokens"
