"""The part of a client's body that reaches a provider: the parameters of its API, nothing else.

LiteLLM takes hundreds of arguments, among them the address of a call, its key, its retries, and
answers to give instead. So the parameters that pass are listed, and all others are refused by name.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from any_agent.completions.params.parameter import BOOLEAN, TOKENS
from any_agent.completions.params.schema_check import Schema, check
from any_agent.errors import InvalidRequest, UnsupportedParameter


def _names(*lines: str) -> frozenset[str]:
    return frozenset(name for line in lines for name in line.split())


_OPERATORS = _names(
    "api_base api_key api_version base_url num_retries max_retries fallbacks custom_llm_provider",
    "mock_response timeout extra_headers extra_body headers model_info litellm_params organization",
    "cache caching input_cost_per_token output_cost_per_token",
    "user_config router_settings_override model_list deployment_id guardrails",
    "disable_global_guardrails proxy_server_request secret_fields region_name",
)
_OPERATORS_PREFIXES = ("litellm_", "mock_", "aws_", "azure_", "vertex_", "user_api_key")
"""Refused parameters that the operator sets in the configuration."""
_OPENAI = _names(
    "temperature top_p top_k min_p repetition_penalty seed presence_penalty frequency_penalty",
    "stream stream_options n stop max_tokens logit_bias logprobs user",
)
_PASSED: dict[str, frozenset[str]] = {
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
_OTHER_ROUTES = _names(
    "model prompt input user n query documents top_n rank_fields return_documents",
    "max_chunks_per_doc max_tokens_per_doc voice instructions response_format speed file language",
    "temperature timestamp_granularities include chunking_strategy image mask background quality",
    "size style moderation input_fidelity output_compression output_format document pages",
    "include_image_base64 image_limit image_min_size messages contents tools system",
)
"""The parameters of LiteLLM's routes for images, speech, ranking and the like. A stream is not one
of them: LiteLLM does not say what it costs."""
_NO_NAME = re.compile(r"[,?#%\\]|\.\.|//")
"""Texts in a model's name by which LiteLLM would call several, or another address."""
_RECORDED = frozenset(("metadata",))
"""Parameters that are recorded and not sent: LiteLLM would take them for its own."""
_UNCOUNTED = {
    "web_search_options": "the provider's search is not the agent's function, and caps would not "
    "see what it costs",
    "service_tier": "a tier has a price of its own, which caps would not see",
}
"""Refused parameters that cost beside tokens, or another price for them."""
_FUNCTIONS: dict[str, tuple[str | None, ...]] = {
    "chat": ("function", "custom"),
    "responses": ("function", "custom"),
    "messages": ("custom", None),
}
"""The types of tools that the agent runs. The provider would run and bill all others, or LiteLLM
itself with any key that it finds."""
_FUNCTION = _names(
    "type name description strict cache_control defer_loading input_examples",
    "eager_input_streaming",
)
_FIELDS: dict[str, frozenset[str]] = {
    "chat": _FUNCTION | _names("function custom"),
    "responses": _FUNCTION | _names("parameters format"),
    "messages": _FUNCTION | _names("input_schema"),
}
"""The fields of such a tool: a provider may take another field for a tool of its own."""
_LEGACY = _names("name description parameters strict")
INPUTS = {
    "chat": "messages",
    "completions": "prompt",
    "responses": "input",
    "messages": "messages",
    "embeddings": "input",
}
"""The parameter with the input by the API's name."""
_SCHEMAS: dict[str, Schema] = {
    "stream": BOOLEAN,
    "stream_options": {"type": "object"},
    "previous_response_id": {"type": "string"},
    "temperature": {"type": "number"},
    "top_p": {"type": "number"},
    **dict.fromkeys(
        ("max_tokens", "max_completion_tokens", "max_output_tokens", "n", "dimensions"), TOKENS
    ),
}
"""The schemas of parameters that are checked here; a provider checks the others."""


@dataclass(frozen=True, slots=True)
class FrozenRequest:
    """A checked body."""

    api: str
    model: str
    params: dict[str, Any]
    """The parameters to send, as the client wrote them."""
    messages: list[dict[str, Any]]
    """The conversation in the API's own form, for the record."""
    tools: list[dict[str, Any]] | None
    recorded: dict[str, Any]
    """The other parameters, for the record."""
    stream: bool
    include_usage: bool
    """True if the client requested the usage of its stream."""
    previous: str | None
    """The interaction that `previous_response_id` names."""
    role: str = ""
    """The agent of the session that makes the call."""


def check_frozen_request(api: str, body: Mapping[str, Any]) -> FrozenRequest:
    """Return the request with the parameters that may be sent.

    Raises UnsupportedParameter for a parameter that does not reach providers, InvalidRequest for a
    missing input and for shapes that no provider takes.
    """
    passed, name = _PASSED[api], INPUTS[api]
    require_passed(api, body)
    params = {k: v for k, v in body.items() if k in passed and v is not None}
    if not params.get(name):
        raise InvalidRequest(f"{name} is missing", param=name)
    for each, schema in _SCHEMAS.items():
        if each in params:
            check(params[each], schema, each)
    check_tools(api, params)
    previous = params.pop("previous_response_id", None)
    apart = {name, "system", "instructions", "tools", "stream", "model"}
    return FrozenRequest(
        api=api,
        model=body["model"],
        params=params,
        messages=_messages(api, params),
        tools=params.get("tools") or None,
        recorded={k: v for k, v in body.items() if k not in apart and v is not None},
        stream=params.get("stream", False),
        include_usage=bool(params.get("stream_options", {}).get("include_usage")),
        previous=previous,
    )


def require_passed(
    api: str | None, body: Mapping[str, Any], where: str = "frozen.model_list"
) -> None:
    """Raise UnsupportedParameter for a parameter that does not reach providers.

    ``api``: None for LiteLLM's other routes. ``where``: the operator's configuration.
    """
    passed = _OTHER_ROUTES if api is None else _PASSED[api] | _RECORDED | {"model"}
    for each in body:
        if each not in passed:
            raise _refused(each, passed, where)


def require_one_model(name: str) -> None:
    """Raise InvalidRequest for a name that LiteLLM would not take for one model's."""
    if _NO_NAME.search(name):
        raise InvalidRequest(
            f"{name[:80]!a} is no model's name: call one by its own", param="model"
        )


def check_tools(api: str, body: Mapping[str, Any]) -> None:
    """Raise InvalidRequest or UnsupportedParameter for tools that the agent does not run itself."""
    _check_tools(api, body.get("tools"))
    _check_functions(body.get("functions"))
    given = body.get("input")
    items = _objects(given, "input") if api == "responses" and isinstance(given, list) else []
    if any("tools" in item for item in items):
        raise UnsupportedParameter(
            "tools in an item of the input do not reach the models of providers here: name them in "
            "tools",
            param="input",
        )


def refuse_operators(body: Mapping[str, Any], where: str) -> None:
    """Raise UnsupportedParameter for a parameter that the operator sets there."""
    own = (n for n in body if n in _OPERATORS or n.lower().startswith(_OPERATORS_PREFIXES))
    if (given := next(own, None)) is not None:
        raise UnsupportedParameter(
            f"{given[:80]} is set by the operator, in {where}: leave it out", param=given[:80]
        )


def _refused(name: str, passed: frozenset[str], where: str) -> UnsupportedParameter:
    refuse_operators({name: None}, where)
    shown = name[:80]
    if name in _UNCOUNTED:
        message = f"{name} does not reach the models of providers here: {_UNCOUNTED[name]}"
    else:
        near = difflib.get_close_matches(shown, passed, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        message = f"{shown!a} does not reach the models of providers here: leave it out{hint}"
    return UnsupportedParameter(message, param=shown)


def _check_tools(api: str, tools: Any) -> None:
    for tool in _objects(tools, "tools"):
        kind = tool.get("type")
        # A list cannot be looked up.
        if not isinstance(kind, str | None) or kind not in _FUNCTIONS[api]:
            raise _no_function(next(iter(tool), None) if kind is None else kind, "tools")
        if unknown := sorted(tool.keys() - _FIELDS[api]):
            raise UnsupportedParameter(
                f"a tool's {unknown[0][:80]!a} does not reach the models of providers here: leave "
                "it out",
                param="tools",
            )
        schema = {"chat": kind, "messages": "input_schema"}.get(api)
        if schema is not None and not isinstance(tool.get(schema), dict):
            # By its name alone the tool might be a provider's.
            raise InvalidRequest(f"a tool's {schema} must be an object", param="tools")


def _check_functions(functions: Any) -> None:
    for each in _objects(functions, "functions"):
        if unknown := sorted(each.keys() - _LEGACY):
            raise _no_function(unknown[0], "functions")
        if not isinstance(each.get("name"), str):
            raise InvalidRequest("a function's name must be a string", param="functions")


def _objects(value: Any, where: str, param: str | None = None) -> list[dict[str, Any]]:
    """Return a list of objects, which may be left out; InvalidRequest for anything else."""
    items = [] if value is None else value
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise InvalidRequest(f"{where} must be a list of objects", param=param or where)
    return items


def _no_function(kind: object, param: str) -> UnsupportedParameter:
    return UnsupportedParameter(
        f"the tool {str(kind)[:80]!a} does not reach the models of providers here: only functions "
        "that the agent runs itself do",
        param=param,
    )


def _messages(api: str, params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the conversation; InvalidRequest names the part with a wrong shape."""
    name = INPUTS[api]
    given = params[name]
    if name == "messages":
        _check_messages(given)
    elif not isinstance(given, str | list):
        raise InvalidRequest(f"{name} must be a string or a list", param=name)
    elif api != "responses" or isinstance(given, str):
        given = [{"role": "user", "content": given}]
    system = params.get("system") or params.get("instructions")
    return [*([{"role": "system", "content": system}] if system else []), *given]


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
                f"{where}.content must be a string, or a list of objects with a type", param=where
            )
        _objects(message.get("tool_calls") or None, f"{where}.tool_calls", where)
