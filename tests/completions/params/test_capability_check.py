"""What an engine or a vocabulary cannot do is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from any_agent.completions.prepare import require_supported
from any_agent.engine import Capabilities
from any_agent.errors import InvalidRequest, UnsupportedParameter
from tests.support.completions.params import TOOL, parse
from tests.support.errors import fails_with

ALL = Capabilities()


@pytest.mark.parametrize(
    ("capability", "api", "asked"),
    [
        ("top_logprobs", "chat", {"top_logprobs": 1, "logprobs": True}),
        ("top_logprobs", "completions", {"logprobs": 1}),
        ("penalties", "chat", {"frequency_penalty": 1}),
        ("penalties", "chat", {"presence_penalty": 1}),
        ("penalties", "chat", {"repetition_penalty": 1.5}),
        ("min_p", "chat", {"min_p": 0.5}),
        ("logit_bias", "chat", {"logit_bias": {"5": 1}}),
        ("grammar", "chat", {"response_format": {"type": "json_object"}}),
        ("grammar", "completions", {"guided_regex": "a"}),
        ("structural_tag", "chat", {"response_format": {"type": "json_object"}, "tools": [TOOL]}),
    ],
)
def test_a_parameter_that_the_engine_lacks_is_refused_by_name(
    capability: str, api: Any, asked: dict[str, Any]
) -> None:
    call = parse("eval", api=api, **asked)
    require_supported(call, ALL, vocab_size=10)
    with pytest.raises(UnsupportedParameter) as raised:
        require_supported(call, replace(ALL, **{capability: False}), vocab_size=10)
    assert raised.value.param in asked
    nothing = Capabilities(**dict.fromkeys(Capabilities.names(), False))
    require_supported(parse("eval", api=api), nothing, vocab_size=10)


def test_log_probabilities_need_no_capability() -> None:
    none = replace(ALL, top_logprobs=False)
    require_supported(parse(logprobs=True), none, vocab_size=10)
    require_supported(parse(api="completions", logprobs=0), none, vocab_size=10)


@pytest.mark.parametrize("asked", [{"logit_bias": {"9": 1}}, {"stop_token_ids": [9]}])
def test_token_ids_outside_the_vocabulary_are_refused(asked: dict[str, Any]) -> None:
    call = parse(**asked)
    require_supported(call, ALL, vocab_size=10)
    with fails_with(InvalidRequest, "vocabulary of 9") as raised:
        require_supported(call, ALL, vocab_size=9)
    assert raised.value.param in asked
