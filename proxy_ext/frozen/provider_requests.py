"""What of a client's body reaches a provider: the parameters of its API, and nothing else.

LiteLLM takes hundreds of arguments, among them where a call goes, with whose key, how often, and
what is answered instead. So there is a list of what passes, and everything else is refused by name.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from any_agent.errors import InvalidRequest, UnsupportedParameter
from proxy_ext.frozen.provider import FrozenApi


def _names(*lines: str) -> frozenset[str]:
    return frozenset(name for line in lines for name in line.split())


_OPERATORS = _names(
    "api_base api_key api_version base_url num_retries max_retries fallbacks custom_llm_provider",
    "mock_response timeout extra_headers extra_body headers model_info litellm_params organization",
    "cache caching input_cost_per_token output_cost_per_token",
)
"""Of those that are refused, what the operator's configuration says."""
_OPENAI = _names(
    "temperature top_p top_k min_p repetition_penalty seed presence_penalty frequency_penalty",
    "stream stream_options n stop max_tokens logit_bias logprobs user",
)
_PASSED: dict[FrozenApi, frozenset[str]] = {
    "chat": _OPENAI
    | _names(
        "messages max_completion_tokens tools tool_choice parallel_tool_calls functions",
        "function_call response_format top_logprobs reasoning_effort reasoning verbosity thinking",
        "modalities audio prediction store safety_identifier prompt_cache_key",
        "prompt_cache_retention chat_template_kwargs",
    ),
    "completions": _OPENAI | _names("prompt suffix echo best_of"),
    "responses": _names(
        "input instructions stream stream_options temperature top_p include max_output_tokens",
        "max_tool_calls parallel_tool_calls previous_response_id reasoning store text tool_choice",
        "tools top_logprobs truncation user safety_identifier prompt_cache_key",
        "prompt_cache_retention",
    ),
    "messages": _names(
        "messages system max_tokens stream stop_sequences temperature top_p top_k thinking tools",
        "tool_choice output_config cache_control",
    ),
    "embeddings": _names("input dimensions encoding_format user"),
}
_RECORDED = frozenset(("metadata",))
"""Not sent: LiteLLM would take it for its own."""
_UNCOUNTED = {
    "web_search_options": "the provider's search is not the agent's function, and caps would not "
    "see what it costs",
    "service_tier": "a tier has a price of its own, which caps would not see",
}
"""Of those that are refused, what costs beside tokens, or other than their price."""
_FUNCTIONS: dict[FrozenApi, tuple[str | None, ...]] = {
    "chat": ("function", "custom"),
    "responses": ("function", "custom"),
    "messages": ("custom", None),
}
"""The types of tools that the agent runs. Others the provider runs and bills, or LiteLLM itself,
with whichever key it finds."""
_FUNCTION = _names(
    "type name description strict cache_control defer_loading input_examples",
    "eager_input_streaming",
)
_FIELDS: dict[FrozenApi, frozenset[str]] = {
    "chat": _FUNCTION | _names("function custom"),
    "responses": _FUNCTION | _names("parameters format"),
    "messages": _FUNCTION | _names("input_schema"),
}
"""What such a tool has: a provider may take another field for a tool of its own."""
_LEGACY = _names("name description parameters strict")
_ASKED: dict[FrozenApi, str] = {
    "chat": "messages",
    "completions": "prompt",
    "responses": "input",
    "messages": "messages",
    "embeddings": "input",
}


@dataclass(frozen=True, slots=True)
class FrozenRequest:
    """A checked body."""

    api: FrozenApi
    model: str
    params: dict[str, Any]
    """What is sent, as the client wrote it."""
    messages: list[dict[str, Any]]
    """What was said, in the API's own form: for the record."""
    tools: list[dict[str, Any]] | None
    recorded: dict[str, Any]
    """The other parameters: for the record."""
    stream: bool
    include_usage: bool
    """Whether the client asked for the usage of its stream."""
    previous: str | None
    """The interaction that `previous_response_id` names."""


def checked(api: FrozenApi, body: Mapping[str, Any]) -> FrozenRequest:
    """The request, if it may be sent.

    Raises:
        UnsupportedParameter: naming a parameter that does not reach providers.
        InvalidRequest: what is asked for is missing, or of a shape that no provider takes.
    """
    passed = _PASSED[api]
    for name in body:
        if name != "model" and name not in passed and name not in _RECORDED:
            raise _refused(name, passed)
    params = {k: v for k, v in body.items() if k in passed and v is not None}
    asked = params.get(_ASKED[api])
    if not asked:
        raise InvalidRequest(f"{_ASKED[api]} is missing", param=_ASKED[api])
    if not isinstance(params.get("stream", False), bool):
        raise InvalidRequest("stream must be true or false", param="stream")
    options = params.get("stream_options") or {}
    if not isinstance(options, dict):
        raise InvalidRequest("stream_options must be an object", param="stream_options")
    _check_numbers(params)
    _check_tools(api, params.get("tools"))
    _check_functions(params.get("functions"))
    previous = params.pop("previous_response_id", None)
    if previous is not None and not isinstance(previous, str):
        raise InvalidRequest("previous_response_id must be a text", param="previous_response_id")
    messages = _messages(api, params)
    said = {_ASKED[api], "system", "instructions", "tools", "stream"}
    return FrozenRequest(
        api=api,
        model=body["model"],
        params=params,
        messages=messages,
        tools=params.get("tools") or None,
        recorded={k: v for k, v in body.items() if k not in said | {"model"} and v is not None},
        stream=params.get("stream", False),
        include_usage=bool(options.get("include_usage")),
        previous=previous,
    )


def _refused(name: str, passed: frozenset[str]) -> UnsupportedParameter:
    shown = name[:80]
    if name in _OPERATORS:
        said = f"{shown} is the operator's to say, in frozen.model_list; leave it out"
    elif name in _UNCOUNTED:
        said = f"{name} does not reach the models of providers here: {_UNCOUNTED[name]}"
    else:
        near = difflib.get_close_matches(shown, passed, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        said = f"{shown!a} does not reach the models of providers here: leave it out{hint}"
    return UnsupportedParameter(said, param=shown)


def _check_numbers(params: Mapping[str, Any]) -> None:
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "n", "dimensions"):
        value = params.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise InvalidRequest(f"{name} must be a whole number, 1 or more", param=name)
    for name in ("temperature", "top_p"):
        value = params.get(name)
        if value is not None and type(value) not in (int, float):
            raise InvalidRequest(f"{name} must be a number", param=name)


def _check_tools(api: FrozenApi, tools: Any) -> None:
    if tools is None:
        return
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidRequest("tools must be a list of objects", param="tools")
    for tool in tools:
        kind = tool.get("type")
        # A list is no key.
        if not isinstance(kind, str | None) or kind not in _FUNCTIONS[api]:
            shown = next(iter(tool), None) if kind is None else kind
            raise _no_function(shown, "tools")
        if unknown := sorted(tool.keys() - _FIELDS[api]):
            raise UnsupportedParameter(
                f"a tool's {unknown[0][:80]!a} does not reach the models of providers here: leave "
                "it out",
                param="tools",
            )
        schema = {"chat": kind, "messages": "input_schema"}.get(api)
        if schema is not None and not isinstance(tool.get(schema), dict):
            # By its name alone it might be a provider's.
            raise InvalidRequest(f"a tool's {schema} must be an object", param="tools")


def _check_functions(functions: Any) -> None:
    if functions is None:
        return
    if not isinstance(functions, list) or not all(isinstance(each, dict) for each in functions):
        raise InvalidRequest("functions must be a list of objects", param="functions")
    for each in functions:
        if unknown := sorted(each.keys() - _LEGACY):
            raise _no_function(unknown[0], "functions")
        if not isinstance(each.get("name"), str):
            raise InvalidRequest("a function's name must be a text", param="functions")


def _no_function(kind: object, param: str) -> UnsupportedParameter:
    return UnsupportedParameter(
        f"the tool {str(kind)[:80]!a} does not reach the models of providers here: only functions "
        "that the agent runs itself do",
        param=param,
    )


def _messages(api: FrozenApi, params: Mapping[str, Any]) -> list[dict[str, Any]]:
    asked = params[_ASKED[api]]
    if api in ("chat", "messages"):
        _check_messages(asked)
        system = params.get("system")
        return [*([{"role": "system", "content": system}] if system else []), *asked]
    if api == "responses":
        if not isinstance(asked, str):
            _check_items(asked)
        instructions = params.get("instructions")
        items = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        return [*([{"role": "system", "content": instructions}] if instructions else []), *items]
    if not isinstance(asked, str | list):
        raise InvalidRequest(f"{_ASKED[api]} must be a text or a list", param=_ASKED[api])
    return [{"role": "user", "content": asked}]


def _check_items(items: Any) -> None:
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise InvalidRequest("input must be a text or a list of objects", param="input")
    if any("tools" in item for item in items):
        raise UnsupportedParameter(
            "tools in an item of the input do not reach the models of providers here: name them "
            "in tools",
            param="input",
        )


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list):
        raise InvalidRequest("messages must be a list", param="messages")
    for k, message in enumerate(messages):
        where = f"messages[{k}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidRequest(f"{where} must be an object with a role", param=where)
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        if not isinstance(content, str | list | None) or not all(
            isinstance(part, dict) and isinstance(part.get("type"), str) for part in parts
        ):
            raise InvalidRequest(
                f"{where}.content must be a text, or a list of objects with a type", param=where
            )
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise InvalidRequest(f"{where}.tool_calls must be a list of objects", param=where)
