"""What of a body reaches a provider: what its API has, and nothing that the operator decides."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from any_agent.errors import AnyAgentError, InvalidRequest, UnsupportedParameter
from proxy_ext.frozen.provider import FrozenApi
from proxy_ext.frozen.requests import checked
from tests.proxy_ext.proxy_lab import HELLO

GOOD: dict[FrozenApi, dict[str, Any]] = {
    "chat": {"messages": HELLO},
    "completions": {"prompt": "a"},
    "responses": {"input": "a"},
    "messages": {"messages": HELLO, "max_tokens": 4},
    "embeddings": {"input": ["a"]},
}
# Of LiteLLM's arguments those that say where a call goes, how often, or with what.
NEVER = ["api_base", "base_url", "api_key", "api_version", "num_retries", "max_retries"]
NEVER += ["fallbacks", "custom_llm_provider", "mock_response", "model_info", "litellm_params"]
NEVER += ["extra_headers", "extra_body", "timeout", "organization", "client", "litellm_metadata"]
NEVER += ["litellm_logging_obj", "proxy_server_request", "guardrails", "vertex_credentials"]
NEVER += ["aws_access_key_id", "api_type", "drop_params", "model_list", "cache", "ssl_verify"]

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda below: (
        st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=6), below, max_size=3)
    ),
    max_leaves=8,
)
FIELDS = ["messages", "prompt", "input", "system", "tools", "stream", "stream_options", "n"]
FIELDS += ["max_tokens", "temperature", "previous_response_id", "instructions", "metadata"]


def check(api: FrozenApi, **more: Any) -> Any:
    return checked(api, {"model": "judge", **GOOD[api], **more}, keeps_responses=True)


@pytest.mark.parametrize("name", NEVER)
@pytest.mark.parametrize("api", GOOD)
def test_what_never_reaches_a_provider(api: FrozenApi, name: str) -> None:
    with pytest.raises(UnsupportedParameter) as raised:
        check(api, **{name: "x"})
    assert raised.value.param == name


@pytest.mark.parametrize("api", GOOD)
def test_what_does(api: FrozenApi) -> None:
    asked = check(api, metadata={"a": 1}, user="u") if api != "messages" else check(api)
    assert "metadata" not in asked.params and "model" not in asked.params
    assert asked.params.items() >= GOOD[api].items()
    assert asked.recorded.get("metadata") == (None if api == "messages" else {"a": 1})


def test_a_name_that_is_nearly_right() -> None:
    with pytest.raises(UnsupportedParameter, match="did you mean temperature"):
        check("chat", temprature=1)


@pytest.mark.parametrize(
    ("api", "more", "param"),
    [
        ("chat", {"messages": []}, "messages"),
        ("chat", {"messages": "a"}, "messages"),
        ("chat", {"messages": [{"role": 1}]}, "messages[0]"),
        ("chat", {"messages": [{"role": "user", "content": [1]}]}, "messages[0]"),
        ("chat", {"messages": [{"role": "assistant", "tool_calls": [1]}]}, "messages[0]"),
        ("chat", {"stream": "yes"}, "stream"),
        ("chat", {"stream_options": [1]}, "stream_options"),
        ("chat", {"n": 0}, "n"),
        ("chat", {"max_tokens": True}, "max_tokens"),
        ("chat", {"temperature": "hot"}, "temperature"),
        ("chat", {"tools": [1]}, "tools"),
        ("completions", {"prompt": {}}, "prompt"),
        ("responses", {"input": [1]}, "input"),
        ("responses", {"previous_response_id": 1}, "previous_response_id"),
        ("responses", {"tools": [{"type": "mcp", "server_url": "http://10.0.0.1"}]}, "tools"),
        ("embeddings", {"input": {}}, "input"),
        ("embeddings", {"dimensions": 0}, "dimensions"),
    ],
)
def test_shapes_that_nobody_takes(api: FrozenApi, more: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        check(api, **more)
    assert (raised.value.param or "").startswith(param)


def test_tools_that_litellm_might_run_itself() -> None:
    kinds: dict[FrozenApi, str] = {"chat": "mcp", "messages": "mcp_toolset", "responses": "litellm"}
    for api, kind in kinds.items():
        with pytest.raises(UnsupportedParameter):
            check(api, tools=[{"type": kind}])
    assert check("responses", tools=[{"type": "web_search"}]).tools
    with pytest.raises(UnsupportedParameter):
        # Of a provider that does not speak that API itself.
        checked(
            "responses",
            {"model": "judge", "input": "a", "tools": [{"type": "web_search"}]},
            keeps_responses=False,
        )


@pytest.mark.parametrize("api", GOOD)
@settings(max_examples=60, deadline=None)
@given(more=st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), JSON, max_size=4))
def test_any_body_is_taken_or_refused(api: FrozenApi, more: dict[str, Any]) -> None:
    body = {**GOOD[api], **more, "model": "judge"}
    try:
        asked = checked(api, body, keeps_responses=False)
    except AnyAgentError as error:
        assert error.status == 400
        return
    assert asked.params.keys() <= body.keys()
    assert not asked.params.keys() & {*NEVER, "model", "metadata"}
    assert all(asked.params[name] is body[name] for name in asked.params)
    assert type(asked.stream) is bool
