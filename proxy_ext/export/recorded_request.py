"""A recorded call as the body of `POST /chat/completions`, for any service that speaks OpenAI's
API."""

from __future__ import annotations

import json
from typing import Any

from any_agent.custom_calls import is_custom
from any_agent.errors import Unprocessable
from any_agent.record import InteractionTree
from any_agent.types import GenerationHyperparameters, Interaction, Message, Tool

_NEUTRAL = {
    "top_p": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""Parameters that are sent unless they change nothing: the last three are not OpenAI's."""
_RECORDED = ("parallel_tool_calls", "reasoning_effort", "chat_template_kwargs")
"""Recorded parameters that shape the prompt or the answer, and are sent as they came."""


def tools_of(tree: InteractionTree, node: Interaction) -> list[Tool]:
    """Return all tools that a call could use, those that its messages show included."""
    return [*(tree.path(node.id)[0].tools or ()), *node.request.get("found_tools", ())]


def request_body(
    tree: InteractionTree, node: Interaction, gconfig: GenerationHyperparameters, model: str | None
) -> dict[str, Any]:
    """Return the body that asks for another answer; ``gconfig``: its sampling.

    Stop ids are left out: the recorded ones are the template's own, which the service has, too.

    Raises Unprocessable for a call that has no such form.
    """
    if node.output_message.get("role") == "completion":
        raise Unprocessable("a call of /v1/completions, which has no messages, is not sent")
    body: dict[str, Any] = {
        "model": model or node.model,
        "messages": [_with_functions(message) for message in tree.messages(node.id)],
        "temperature": gconfig.temperature,
        "max_completion_tokens": gconfig.max_new_tokens,
    }
    for name, neutral in _NEUTRAL.items():
        if (value := getattr(gconfig, name)) != neutral:
            body[name] = value
    if gconfig.stop:
        body["stop"] = list(gconfig.stop)
    if gconfig.logit_bias:
        body["logit_bias"] = {str(id): bias for id, bias in gconfig.logit_bias}
    if gconfig.grammar is not None:
        body |= _format(json.loads(gconfig.grammar))
    recorded = node.request.get("recorded", {})
    body |= {name: recorded[name] for name in _RECORDED if name in recorded}
    if tools := tools_of(tree, node):
        body["tools"] = tools
        if choice := recorded.get("tool_choice"):
            forced = {"type": "function", "function": {"name": choice}}
            body["tool_choice"] = choice if choice == "required" else forced
    return body


def _with_functions(message: Message) -> Message:
    """Return a message whose calls of custom tools are those of the functions that stand for
    them."""
    calls = message.get("tool_calls") or ()
    if not any(map(is_custom, calls)):
        return message
    return {**message, "tool_calls": [{**call, "type": "function"} for call in calls]}


def _format(grammar: dict[str, Any]) -> dict[str, Any]:
    """Return the parameter that asks for a grammar."""
    match grammar:
        case {"json_schema": schema}:
            wanted = {"name": "answer", "schema": schema}
            return {"response_format": {"type": "json_schema", "json_schema": wanted}}
        case {"json_object": _}:
            return {"response_format": {"type": "json_object"}}
        case {"regex": regex}:
            return {"structured_outputs": {"regex": regex}}
    raise Unprocessable(
        "a call with a format beside tools or reasoning is not sent: the record has the engine's "
        "grammar, which no request can have"
    )
