"""What of a body reaches a provider: what its API has, and nothing that the operator decides."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from any_agent.errors import AnyAgentError, InvalidRequest, UnsupportedParameter
from proxy_ext.frozen.provider_requests import check_frozen_request
from tests.support.errors import fails_with
from tests.support.proxy import HELLO

GOOD: dict[str, dict[str, Any]] = {
    "chat": {"messages": HELLO},
    "completions": {"prompt": "a"},
    "responses": {"input": "a"},
    "messages": {"messages": HELLO, "max_tokens": 4},
    "embeddings": {"input": ["a"]},
}
# Of LiteLLM's arguments those that say where a call goes, how often, or with what.
_NEVER = """
    api_base base_url api_key api_version num_retries max_retries fallbacks custom_llm_provider
    mock_response model_info litellm_params extra_headers extra_body timeout organization client
    litellm_metadata litellm_logging_obj proxy_server_request guardrails vertex_credentials
    aws_access_key_id api_type drop_params model_list cache ssl_verify
"""

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda below: (
        st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=6), below, max_size=3)
    ),
    max_leaves=8,
)
_FIELDS = """
    messages prompt input system tools stream stream_options n functions max_tokens temperature
    previous_response_id instructions metadata
"""


WRONG: list[tuple[Any, ...]] = [
    ("chat", "messages", []),
    ("chat", "messages", "a"),
    ("chat", "messages", [{"role": 1}], "messages[0]"),
    ("chat", "messages", [{"role": "user", "content": [1]}], "messages[0]"),
    ("chat", "messages", [{"role": "assistant", "tool_calls": [1]}], "messages[0]"),
    ("chat", "stream", "yes"),
    ("chat", "stream_options", [1]),
    ("chat", "n", 0),
    ("chat", "max_tokens", True),
    ("chat", "temperature", "hot"),
    ("chat", "tools", [1]),
    ("completions", "prompt", {}),
    ("responses", "input", [1]),
    ("responses", "previous_response_id", 1),
    ("responses", "tools", {}),
    ("chat", "tools", [{"type": "function"}]),
    ("chat", "functions", "a"),
    ("chat", "functions", [{}]),
    ("embeddings", "input", {}),
    ("embeddings", "dimensions", 0),
]
"""An API, a parameter, its value, and what is named where that is more than the parameter."""


def check(api: str, **more: Any) -> Any:
    return check_frozen_request(api, {"model": "judge", **GOOD[api], **more})


@pytest.mark.parametrize("api", GOOD)
def test_parameters_that_a_provider_must_not_get_are_refused(api: str) -> None:
    for name in _NEVER.split():
        with fails_with(UnsupportedParameter, param=name):
            check(api, **{name: "x"})


def test_known_fields_reach_the_provider_and_a_misspelt_one_is_refused() -> None:
    for api, fields in GOOD.items():
        asked = check(api, metadata={"a": 1}, user="u") if api != "messages" else check(api)
        assert "metadata" not in asked.params and "model" not in asked.params
        assert asked.params.items() >= fields.items()
        assert asked.recorded.get("metadata") == (None if api == "messages" else {"a": 1})
    with fails_with(UnsupportedParameter, "temperature", param="temprature"):
        check("chat", temprature=1)


def test_wrongly_shaped_values_are_refused_by_name() -> None:
    wrong = []
    for api, name, value, *at in WRONG:
        try:
            check(api, **{name: value})
            found = None
        except InvalidRequest as error:
            found = error.param
        if not (found or "").startswith(at[0] if at else name):
            wrong.append((api, name, value, found))
    assert wrong == []


SCHEMA = {"type": "object", "properties": {}}
TOOLS: dict[str, list[dict[str, Any]]] = {
    "chat": [
        {"type": "function", "function": {"name": "web_search", "parameters": SCHEMA}},
        {"type": "custom", "custom": {"name": "b"}},
    ],
    "responses": [
        {"type": "function", "name": "a", "parameters": SCHEMA, "strict": True},
        {"type": "custom", "name": "b", "format": {"type": "text"}},
    ],
    "messages": [
        {"name": "web_search", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}},
        {"type": "custom", "name": "b", "description": "B", "input_schema": SCHEMA},
    ],
}
_BUILT_IN = """
    web_search web_search_preview file_search code_interpreter mcp computer image_generation
    local_shell shell apply_patch tool_search namespace web_search_20250305 web_fetch_20250910
    code_execution_20250522 bash_20250124 mcp_toolset advisor_20260301 computer_use url litellm
"""


@pytest.mark.parametrize("api", TOOLS)
def test_functions_reach_the_provider_without_other_fields(api: str) -> None:
    assert check(api, tools=TOOLS[api]).params["tools"] == TOOLS[api]
    for tool in TOOLS[api]:
        # A provider may take another field for a tool of its own.
        with fails_with(UnsupportedParameter, "'googleSearch'"):
            check(api, tools=[{**tool, "googleSearch": {}}])


@pytest.mark.parametrize("api", TOOLS)
def test_tools_that_the_provider_would_run_are_refused(api: str) -> None:
    for kind in _BUILT_IN.split():
        for more in ({}, {"server_url": "https://x.example"}, {"function": {"name": "a"}}):
            with fails_with(UnsupportedParameter, f"'{kind}'", param="tools"):
                check(api, tools=[*TOOLS[api], {"type": kind, "name": "a", **more}])


def test_options_that_cost_beside_tokens_are_refused() -> None:
    for api, more, says in (
        ("chat", {"tools": [{"googleSearch": {}}]}, "'googleSearch'"),
        ("chat", {"tools": [{"type": ["function"]}]}, "tool"),
        ("chat", {"tools": [{}]}, "tool"),
        ("chat", {"functions": [{"googleSearch": {}}]}, "'googleSearch'"),
        ("chat", {"web_search_options": {}}, "web_search_options"),
        *((api, {"service_tier": "priority"}, "service_tier") for api in TOOLS),
        ("responses", {"input": [{"type": "additional_tools", "tools": []}]}, "tools in an item"),
    ):
        with fails_with(UnsupportedParameter, says):
            check(api, **more)
    # A tool merely named like one of theirs needs a schema.
    with fails_with(InvalidRequest, "input_schema"):
        check("messages", tools=[{"name": "web_search"}])


@pytest.mark.parametrize("api", GOOD)
@settings(max_examples=60, deadline=None)
@given(
    more=st.dictionaries(st.sampled_from(_FIELDS.split()) | st.text(max_size=5), JSON, max_size=4)
)
def test_any_body_is_taken_or_refused_without_a_crash(api: str, more: dict[str, Any]) -> None:
    body = {**GOOD[api], **more, "model": "judge"}
    try:
        asked = check_frozen_request(api, body)
    except AnyAgentError as error:
        assert error.status == 400
        return
    assert asked.params.keys() <= body.keys()
    assert not asked.params.keys() & {*_NEVER.split(), "model", "metadata"}
    assert all(asked.params[name] is body[name] for name in asked.params)
    assert type(asked.stream) is bool
