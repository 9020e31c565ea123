"""Checks the bodies of chat and legacy completions by the table of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

from any_agent.completions.params.call import ChatCall, ParseSettings, TextInput
from any_agent.completions.params.custom_tools import shown_of, with_custom_calls, with_functions
from any_agent.completions.params.grammar import grammar_of, unless_forced
from any_agent.completions.params.parameter import (
    COMPLETION_TOKENS,
    MAX_CHOICES,
    MAX_PROMPT_IDS,
    Parameter,
    UnknownParameters,
)
from any_agent.completions.params.sampling import sampling_of
from any_agent.completions.params.schema_check import (
    check,
    json_text,
    require_names,
    require_object,
    shown,
)
from any_agent.completions.params.table import TABLE
from any_agent.completions.params.tools import (
    asks_for_functions,
    functions_of,
    note_strict,
    tools_of,
    with_tool_calls,
)
from any_agent.completions.params.unknown_fields import UnknownFields, rest_of, template_kwargs_of
from any_agent.errors import ContextLengthExceeded, InvalidRequest, UnsupportedParameter

_STREAM_OPTIONS = ("include_usage", "include_obfuscation", "continuous_usage_stats")


def parse_chat(body: Any, settings: ParseSettings) -> ChatCall:
    """Check a `/chat/completions` body.

    Raises InvalidRequest or UnsupportedParameter, naming the parameter.
    """
    body, recorded, rest = sort_parameters(
        body, TABLE["chat"], settings.known_settings, settings.unknown
    )
    messages = body.get("messages")
    if not messages:
        raise InvalidRequest("messages must be a list of at least one message", param="messages")
    older = asks_for_functions(body)
    given, formats = with_functions(body.get("tools"))
    tools, forced = functions_of(body) if older else tools_of({**body, "tools": given}, formats)
    note_strict(tools or (), rest)
    custom = shown_of(tools, formats, rest)
    grammar, asked_by = unless_forced(*grammar_of(body), forced, rest)
    top = body.get("top_logprobs") or 0
    if top and not body.get("logprobs"):
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    call = call_of(body, recorded, rest, settings, grammar=grammar, effort=_effort(body))
    return replace(
        call,
        messages=with_custom_calls(with_tool_calls(messages)),
        tools=tools,
        custom=frozenset(custom),
        include_usage=_include_usage(body),
        logprobs=bool(body.get("logprobs")),
        top_logprobs=top,
        forced_call=forced,
        legacy_functions=older,
        format_parameter=asked_by,
    )


def parse_completion(body: Any, settings: ParseSettings) -> ChatCall:
    """Check a legacy `/completions` body, to which no chat template is applied.

    Raises InvalidRequest or UnsupportedParameter, naming the parameter.
    """
    body, recorded, rest = sort_parameters(body, TABLE["completions"], unknown=settings.unknown)
    prompts = prompts_of(body.get("prompt"))
    n = body.get("n") or 1
    if n * len(prompts) > MAX_CHOICES:
        raise InvalidRequest(
            f"{len(prompts)} prompts times n={n} are more than {MAX_CHOICES} choices", param="n"
        )
    if body.get("best_of") not in (None, n):
        raise UnsupportedParameter(
            "best_of must equal n: discarded answers would not be recorded",
            param="best_of",
        )
    top = body.get("logprobs")
    if body.get("echo") and top is not None:
        raise UnsupportedParameter(
            "echo with logprobs is not supported: prompts have no logprobs here", param="echo"
        )
    grammar, asked_by = grammar_of(body)
    call = call_of(body, recorded, rest, settings, tokens=COMPLETION_TOKENS, grammar=grammar)
    return replace(
        call,
        include_usage=_include_usage(body),
        logprobs=top is not None,
        top_logprobs=top or 0,
        format_parameter=asked_by,
        prompts=prompts,
        id_prefix="cmpl-",
        prompt_parameter="prompt",
        echo=bool(body.get("echo")),
    )


def call_of(
    body: Mapping[str, Any],
    recorded: Mapping[str, Any],
    rest: UnknownFields,
    settings: ParseSettings,
    *,
    grammar: str | None,
    effort: str | None = None,
    tokens: int | None = None,
) -> ChatCall:
    """Return a call with the parameters that all APIs share, from :func:`sort_parameters`.

    ``tokens``: the token limit of a body without one; by default the run's. Raises InvalidRequest
    or UnsupportedParameter, naming the parameter.
    """
    run = settings.sampling
    gconfig, overrides = sampling_of(
        body, mode=settings.mode, run=run, tokens=tokens or run.max_new_tokens, grammar=grammar
    )
    # It adds to the ignored and recorded fields of `rest`.
    template_kwargs = template_kwargs_of(body, rest, settings.known_settings, settings.unknown)
    noted = {} if effort is None else {"reasoning_effort": effort}
    return ChatCall(
        model=body.get("model") or settings.model,
        messages=[],
        tools=None,
        gconfig=gconfig,
        stream=bool(body.get("stream")),
        overrides=overrides,
        recorded={**recorded, **rest.recorded, **noted},
        ignored=tuple(rest.ignored),
        n=body.get("n") or 1,
        template_kwargs=template_kwargs,
        reasoning_effort=effort,
        parallel_tool_calls=body.get("parallel_tool_calls") is not False,
    )


def sort_parameters(
    body: Any,
    table: Mapping[str, Parameter],
    known_settings: Set[str] = frozenset(),
    unknown: UnknownParameters = "record",
) -> tuple[dict[str, Any], dict[str, Any], UnknownFields]:
    """Check a body's parameters by the rows of its API.

    Returns the body, the parameters that are only recorded, and those without a row.
    Raises InvalidRequest or UnsupportedParameter, naming the parameter.
    """
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    recorded, others = {}, {}
    for name, value in body.items():
        row = table.get(name)
        if row is None:
            others[name] = value
            continue
        if value is None:
            continue
        if row.kind == "refused":
            _require_neutral(row, value)
        elif row.checked:
            check(value, row.schema, name)
            if "x-max-bytes" in row.schema:
                json_text(value, name, longest=row.schema["x-max-bytes"])
        if row.kind != "honoured":
            recorded[name] = value
    return (
        body,
        recorded,
        rest_of(others, table, known_settings, unknown) if others else UnknownFields(),
    )


def _require_neutral(row: Parameter, value: Any) -> None:
    try:
        check(value, row.schema, row.name)
    except InvalidRequest:
        asked = row.name if isinstance(value, dict | list) else f"{row.name}={shown(value)}"
        raise UnsupportedParameter(
            f"{asked} is not supported here. {row.meaning}", param=row.name, details=row.details
        ) from None


def _include_usage(body: Mapping[str, Any]) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    require_names(require_object(options, "stream_options"), "stream_options", _STREAM_OPTIONS)
    for name, value in options.items():
        if value is not None:
            check(value, {"type": "boolean"}, f"stream_options.{name}")
    if options.get("continuous_usage_stats"):
        at = "stream_options.continuous_usage_stats"
        raise UnsupportedParameter(f"{at} is not supported: use include_usage", param=at)
    return bool(options.get("include_usage"))


def _effort(body: Mapping[str, Any]) -> str | None:
    effort = body.get("reasoning_effort")
    reasoning = body.get("reasoning")
    if reasoning is None:
        return effort
    given = require_object(reasoning, "reasoning")
    if {k: v for k, v in given.items() if k != "effort" and v is not None} not in (
        {},
        {"enabled": True},
        {"exclude": False},
        {"enabled": True, "exclude": False},
    ):
        raise UnsupportedParameter(
            "reasoning may have an effort; for more, use chat_template_kwargs", param="reasoning"
        )
    other = given.get("effort")
    if other is not None:
        check(other, TABLE["chat"]["reasoning_effort"].schema, "reasoning")
    if effort is not None and other not in (None, effort):
        raise InvalidRequest(
            "reasoning and reasoning_effort contradict each other", param="reasoning"
        )
    return effort or other


def prompts_of(value: Any) -> tuple[TextInput, ...]:
    """Return the prompts, which OpenAI's API takes in four forms."""
    if isinstance(value, str):
        return (_text(value),)
    if not isinstance(value, list) or not value:
        raise _wrong()
    if isinstance(value[0], int):
        return (_ids(value),)
    if len(value) > MAX_CHOICES:
        raise InvalidRequest(
            f"there are {len(value)} prompts: send at most {MAX_CHOICES} in one request",
            param="prompt",
        )
    return tuple(_text(each) if isinstance(each, str) else _ids(each) for each in value)


def _text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(
            "prompt has a lone surrogate: send valid Unicode", param="prompt"
        ) from None
    if not text:
        raise InvalidRequest("prompt is empty: an answer needs a token to follow", param="prompt")
    return text


def _ids(ids: Any) -> tuple[int, ...]:
    if not isinstance(ids, list) or not ids:
        raise _wrong()
    if len(ids) > MAX_PROMPT_IDS:
        raise ContextLengthExceeded(
            f"a prompt has {len(ids)} token ids: no context is that long; send fewer",
            param="prompt",
        )
    # This is quick, for there may be a million ids; bool is another type.
    if {*map(type, ids)} != {int} or min(ids) < 0 or max(ids) >= 2**31:
        raise InvalidRequest("prompt has an id that is not a token's", param="prompt")
    return tuple(ids)


def _wrong() -> InvalidRequest:
    return InvalidRequest(
        "prompt must be a text, a list of texts, a list of token ids or a list of such lists, "
        "none of them empty",
        param="prompt",
    )
