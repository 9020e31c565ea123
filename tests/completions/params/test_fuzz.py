"""Whatever JSON a body is: a valid call, or an error that says what is wrong with it."""

from __future__ import annotations

import math
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from any_agent.completions.params.call import ChatCall
from any_agent.completions.params.parameter import MAX_CHOICES, MAX_STOPS
from any_agent.completions.params.sampling import TOKEN_LIMITS
from any_agent.completions.params.table import TABLE
from any_agent.completions.untrainable import REASONS
from any_agent.errors import InvalidRequest, NotFound
from tests.support.completions.params import BODIES, RUN, parse

NUMBERS = (
    st.integers()
    | st.floats()
    | st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64, -(2**63), 10**400, 0.0, -0.0, 1e308])
)
WORDS = st.text(max_size=8) | st.sampled_from(
    ["", "auto", "none", "required", "function", "json_schema", "json_object", "text", "\ud800"]
)
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS,
    lambda below: st.lists(below, max_size=4) | st.dictionaries(WORDS, below, max_size=4),
    max_leaves=8,
)
KEYS = ["type", "function", "name", "parameters", "schema", "json_schema", "effort", "mode"]
KEYS += ["tools", "allowed_tools", "json", "regex", "choice", "include_usage", "5", "-1"]
NAMED: st.SearchStrategy[Any] = st.recursive(
    JSON,
    lambda below: (
        st.lists(below, max_size=3) | st.dictionaries(st.sampled_from(KEYS), below, max_size=3)
    ),
    max_leaves=8,
)


def bodies(api: str) -> st.SearchStrategy[dict[str, Any]]:
    """Nearly right: known names with any value, seldom an unknown one."""
    name = st.sampled_from(sorted(TABLE[api])) | st.sampled_from(sorted(TABLE[api])) | WORDS
    fields = st.dictionaries(name, NAMED, max_size=4)
    return fields.map(lambda given: {**BODIES[api], **given})


def require_valid(call: ChatCall, mode: str) -> None:
    g = call.gconfig
    assert 1 <= g.max_new_tokens <= RUN.max_new_tokens
    assert 0 <= g.temperature <= 2
    assert 0 < g.top_p <= 1
    assert g.top_k == -1 or g.top_k > 0
    numbers = (g.min_p, g.frequency_penalty, g.presence_penalty, g.repetition_penalty)
    assert all(map(math.isfinite, numbers))
    assert len(g.stop) <= MAX_STOPS
    assert all(g.stop)
    assert call.n * max(1, len(call.prompts)) <= MAX_CHOICES
    assert call.untrainable in (None, *REASONS)
    if mode == "train":
        assert (g.temperature, g.top_p, g.top_k, g.min_p, g.seed) == (1.0, 1.0, -1, 0.0, None)
    else:
        assert not call.overrides.keys() - set(TOKEN_LIMITS)
    # What an engine and an answer get must be JSON.
    orjson.dumps([call.model, g.stop, g.grammar, g.logit_bias, call.tools])
    orjson.dumps([call.template_kwargs, call.reasoning_effort, call.forced_call, call.recorded])


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("api", BODIES)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
@pytest.mark.service
def test_a_nearly_right_body_is_a_valid_call_or_refused_by_name(
    api: str, mode: str, data: st.DataObject
) -> None:
    body = data.draw(bodies(api))
    try:
        call = parse(mode, api=api, body=body)
    except (InvalidRequest, NotFound) as error:
        assert error.status in (400, 404)
        assert error.param is not None
        assert error.param.isprintable()
        assert len(error.message) < 500
        orjson.dumps(error.body())
    else:
        require_valid(call, mode)


@pytest.mark.parametrize("api", BODIES)
@settings(max_examples=100, deadline=None)
@given(body=JSON)
def test_any_json_is_a_valid_call_or_refused(api: str, body: Any) -> None:
    try:
        require_valid(parse(api=api, body=body), "train")
    except (InvalidRequest, NotFound) as error:
        orjson.dumps(error.body())


@pytest.mark.parametrize("api", BODIES)
@pytest.mark.parametrize("deep", [[], {}])
def test_any_depth_is_refused_by_name(api: str, deep: Any) -> None:
    for _ in range(5_000):
        deep = [deep] if isinstance(deep, list) else {"type": deep}
    for name in TABLE[api]:
        if name == "messages":
            # Read, and refused, where they are rendered.
            continue
        with pytest.raises(InvalidRequest) as raised:
            parse(api=api, **{name: deep})
        assert raised.value.param
