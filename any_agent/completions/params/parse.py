"""What an agent may ask for: the three classes of parameters.

Honoured ones shape the call. Harmless ones are recorded and change nothing. Everything else is
refused by name, because ignoring it would train on something other than what was asked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from any_agent.errors import InvalidRequest, UnsupportedParameter
from any_agent.types import GenerationHyperparameters, Message, SessionMode, Tool

HONOURED = frozenset(
    {
        "model",
        "messages",
        "tools",
        "tool_choice",
        "stream",
        "stream_options",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "stop",
        "logprobs",
        "n",
    }
)
HARMLESS: dict[str, type] = {
    "metadata": dict,
    "prompt_cache_key": str,
    "prompt_cache_retention": str,
    "reasoning_effort": str,
    "safety_identifier": str,
    "seed": int,
    "service_tier": str,
    "store": bool,
    "user": str,
    "verbosity": str,
}
"""With their types: what is recorded is at least what it claims to be."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": ("none", "auto"),
}
"""Harmless at these values (or null), refused at any other."""

_MAX_STOPS = 16


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A chat request, checked, with the sampling that will be used."""

    model: str
    messages: list[Message]
    tools: list[Tool] | None
    gconfig: GenerationHyperparameters
    stream: bool
    include_usage: bool
    logprobs: bool
    overrides: dict[str, Any] = field(default_factory=dict)
    """What the agent asked for and the run's sampling replaced."""
    recorded: dict[str, Any] = field(default_factory=dict)
    """Harmless parameters."""
    n: int = 1
    """Choices."""
    top_logprobs: int = 0
    """How many of the likeliest tokens to tell of at each position."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """For the chat template."""
    forced_call: str | None = None
    """The tool that must be called, "" for any; None where nothing is forced."""
    parallel_tool_calls: bool = True
    untrainable: str | None = None
    """Why no answer to it can be trained on."""
    prompts: tuple[str | tuple[int, ...], ...] = ()
    """Of a legacy completion, which has no messages: texts, or token ids."""
    echo: bool = False
    """Of a legacy completion: the answer begins with the prompt."""


def parse_chat(
    body: Any, *, mode: SessionMode, sampling: GenerationHyperparameters, model: str
) -> ChatCall:
    """Check a `/chat/completions` body.

    In train sessions the run's ``sampling`` replaces the agent's, and tokens are the least of
    both; eval sessions keep the agent's own, the run's token limit aside. Raises InvalidRequest
    or UnsupportedParameter, naming the parameter.
    """
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    recorded = _sort_out(body)
    tools = _tools(body)
    asked, wanted = _sampling(body)
    tokens = wanted.pop("max_new_tokens", sampling.max_new_tokens)
    limit = min(tokens, sampling.max_new_tokens)
    stop = wanted.pop("stop", ())
    overrides: dict[str, Any] = {"max_new_tokens": tokens} if tokens > limit else {}
    if mode is SessionMode.TRAIN:
        gconfig = sampling.new(max_new_tokens=limit, stop=stop)
        overrides |= {
            key: asked[key] for key, value in wanted.items() if getattr(gconfig, key) != value
        }
    else:
        gconfig = GenerationHyperparameters(
            max_new_tokens=limit, stop=stop, stop_token_ids=sampling.stop_token_ids, **wanted
        )
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise InvalidRequest("stream_options must be an object", param="stream_options")
    return ChatCall(
        model=_text(body, "model") or model,
        messages=_messages(body),
        tools=tools,
        gconfig=gconfig,
        stream=_flag(body, "stream"),
        include_usage=_flag(options, "include_usage"),
        logprobs=_flag(body, "logprobs"),
        overrides=overrides,
        recorded=recorded,
    )


def _sort_out(body: Mapping[str, Any]) -> dict[str, Any]:
    recorded: dict[str, Any] = {}
    for key, value in body.items():
        if key in HONOURED or value is None:
            continue
        if key in HARMLESS:
            _require_type(key, value, HARMLESS[key])
            recorded[key] = value
        elif key in NEUTRAL:
            recorded[key] = value
            # Without tools there is nothing to call in parallel.
            means_nothing = key == "parallel_tool_calls" and not body.get("tools")
            if value not in NEUTRAL[key] and not means_nothing:
                raise UnsupportedParameter(
                    f"{key}={_short(value)} is not supported here: it would change the "
                    f"distribution or the format in a way that is not recorded; leave it out",
                    param=key,
                )
        else:
            raise UnsupportedParameter(f"unknown parameter {_short(key)}", param=str(key)[:64])
    if body.get("n") not in (None, 1):
        raise UnsupportedParameter("n must be 1; make one call per sample", param="n")
    return recorded


def _tools(body: Mapping[str, Any]) -> list[Tool] | None:
    tools = body.get("tools") or None
    if tools is not None:
        if not isinstance(tools, list):
            raise InvalidRequest("tools must be a list", param="tools")
        for k, tool in enumerate(tools):
            function = tool.get("function") if isinstance(tool, dict) else None
            if (
                not isinstance(function, dict)
                or tool.get("type") != "function"
                or not isinstance(function.get("name"), str)
            ):
                raise InvalidRequest(
                    f'tools[{k}] must be {{"type": "function", "function": {{"name": ...}}}}',
                    param="tools",
                )
    choice = body.get("tool_choice")
    if choice in (None, "auto"):
        return tools
    if choice == "none":
        return None
    raise UnsupportedParameter(
        "tool_choice must be auto or none: a forced call cannot be recorded exactly",
        param="tool_choice",
    )


def _sampling(body: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What was asked for: as the agent named it, and as generation settings."""
    wanted: dict[str, Any] = {}
    for key, low, high in (("temperature", 0.0, 2.0), ("top_p", 0.0, 1.0)):
        if body.get(key) is not None:
            wanted[key] = _number(body, key, low, high)
    if wanted.get("top_p") == 0:
        raise InvalidRequest("top_p must be greater than 0", param="top_p")
    if body.get("top_k") is not None:
        top_k = _integer(body, "top_k", -1)
        wanted["top_k"] = top_k if top_k > 0 else -1
    limits = [
        _integer(body, key, 1)
        for key in ("max_completion_tokens", "max_tokens")
        if body.get(key) is not None
    ]
    if limits:
        wanted["max_new_tokens"] = min(limits)
    asked = dict(wanted)
    stop = body.get("stop")
    if stop is not None:
        stops = [stop] if isinstance(stop, str) else stop
        if (
            not isinstance(stops, list)
            or len(stops) > _MAX_STOPS
            or not all(isinstance(s, str) and s for s in stops)
        ):
            raise InvalidRequest(
                f"stop must be a non-empty string or up to {_MAX_STOPS} of them", param="stop"
            )
        wanted["stop"] = tuple(stops)
    return asked, wanted


def _messages(body: Mapping[str, Any]) -> list[Message]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a list of at least one message", param="messages")
    return messages


def _number(body: Mapping[str, Any], key: str, low: float, high: float) -> float:
    value = body[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidRequest(f"{key} must be a number", param=key)
    if not low <= value <= high:
        raise InvalidRequest(f"{key} must be between {low:g} and {high:g}", param=key)
    return float(value)


def _integer(body: Mapping[str, Any], key: str, low: int) -> int:
    value = body[key]
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{key} must be an integer", param=key)
    if value < low:
        raise InvalidRequest(f"{key} must be at least {low}", param=key)
    return value


def _require_type(key: str, value: Any, kind: type) -> None:
    # bool is an int to isinstance.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        words = {dict: "an object", str: "a string", int: "an integer", bool: "true or false"}
        raise InvalidRequest(f"{key} must be {words[kind]}", param=key)


def _flag(body: Mapping[str, Any], key: str) -> bool:
    value = body.get(key)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise InvalidRequest(f"{key} must be true or false", param=key)
    return value


def _text(body: Mapping[str, Any], key: str) -> str:
    value = body.get(key)
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(f"{key} must be a string", param=key)
    return value or ""


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
