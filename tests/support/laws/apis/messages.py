"""`/v1/messages`, read by Anthropic's SDK."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import orjson
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message as AnthropicMessage
from anthropic.types import RawMessageStreamEvent

from any_agent.types import Message
from tests.support.laws.apis.given import (
    Asked,
    Given,
    events_of,
    leading_system,
    model_of,
    text_of,
)

_FINISH = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "tool_use": "tool_calls",
}
_DELTAS = {
    "text": ("text_delta",),
    "thinking": ("thinking_delta", "signature_delta"),
    "tool_use": ("input_json_delta",),
}
MANY = 4096
INVALID = "INVALID_JSON"
"""The field, in Anthropic's documents, that holds what is no JSON object."""


class Messages:
    name = "messages"
    path = "/v1/messages"

    def body(self, asked: Asked) -> dict[str, Any]:
        system, rest = leading_system(asked.messages)
        out: dict[str, Any] = {"model": "m", "stream": asked.stream}
        out["max_tokens"] = MANY if asked.max_tokens is None else asked.max_tokens
        if system is not None:
            out["system"] = system
        out["messages"] = turns_of(rest)
        if asked.tools:
            out["tools"] = [_tool(tool["function"]) for tool in asked.tools]
        if asked.stop:
            out["stop_sequences"] = list(asked.stop)
        return out | asked.fields

    def whole(self, data: bytes) -> list[Given]:
        body = orjson.loads(data)
        model_of(AnthropicMessage).validate_python(body, strict=True)
        return [given(body)]

    def streamed(self, data: bytes) -> list[Given]:
        return [given(accumulated(events_of(data)))]

    def problem(self, data: Any) -> tuple[str, str, str]:
        assert data["type"] == "error" and data.keys() <= {"type", "error", "request_id"}, data
        error = data["error"]
        assert {"type", "message"} <= error.keys(), error
        assert error["type"] in ERRORS, error
        return error["type"], error.get("code", ""), error["message"]


ERRORS = {
    "invalid_request_error",
    "authentication_error",
    "billing_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "timeout_error",
    "api_error",
    "overloaded_error",
}
"""The types that Anthropic's documents name."""


def turns_of(messages: Sequence[Message]) -> list[Any]:
    """Return messages with blocks that say what chat messages do; tool results and the text after
    them are one user's message, other texts of users stay apart."""
    out: list[Any] = []
    for message in messages:
        role = "assistant" if message["role"] == "assistant" else "user"
        said = _blocks(message)
        before = out[-1]["content"] if role == "user" and out else None
        if isinstance(before, list) and out[-1]["role"] == "user":
            if isinstance(said, str):
                said = [{"type": "text", "text": said}]
            out[-1] = {"role": "user", "content": [*before, *said]}
        else:
            out.append({"role": role, "content": said})
    return out


def _blocks(message: Message) -> Any:
    if isinstance(message, Given) and message.api == "messages":
        return message.raw
    text = text_of(message.get("content"))
    if message["role"] == "tool":
        id = message["tool_call_id"]
        return [{"type": "tool_result", "tool_use_id": id, "content": text}]
    if message["role"] != "assistant":
        return text
    said: list[Any] = [{"type": "text", "text": text}] if text else []
    for call in message.get("tool_calls") or []:
        function = call["function"]
        block = {"type": "tool_use", "id": call["id"], "name": function["name"]}
        said.append({**block, "input": input_of(function["arguments"])})
    return said


def input_of(arguments: str) -> dict[str, Any]:
    """As an agent writes arguments, also those that are no object."""
    try:
        value = orjson.loads(arguments)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {INVALID: arguments}


def _arguments(given: dict[str, Any]) -> str:
    if given.keys() == {INVALID}:
        return str(given[INVALID])
    return json.dumps(given, ensure_ascii=False)


def _tool(function: dict[str, Any]) -> dict[str, Any]:
    out = {k: v for k, v in function.items() if k != "parameters"}
    return {**out, "input_schema": function["parameters"]}


def given(body: dict[str, Any]) -> Given:
    """The answer of one message object."""
    assert (body["type"], body["role"]) == ("message", "assistant")
    message: Message = {"role": "assistant"}
    calls = []
    for block in body["content"]:
        match block["type"]:
            case "text":
                message["content"] = message.get("content", "") + block["text"]
            case "thinking":
                before = message.get("reasoning_content", "")
                message["reasoning_content"] = before + block["thinking"]
                assert block["signature"]
            case _:
                assert block["type"] == "tool_use", block
                assert isinstance(block["input"], dict)
                function = {"name": block["name"], "arguments": _arguments(block["input"])}
                calls.append({"id": block["id"], "type": "function", "function": function})
    if calls:
        message["tool_calls"] = calls
    assert (body["stop_reason"] == "stop_sequence") == (body["stop_sequence"] is not None)
    return Given(
        message,
        api="messages",
        interaction=body["id"],
        finish=_FINISH[body["stop_reason"]],
        raw=body["content"],
        whole=body,
    )


def accumulated(events: Sequence[tuple[str | None, Any]]) -> dict[str, Any]:
    """What the SDK puts together from a stream, whose order is held."""
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    open_at: int | None = None
    blocks = 0
    for name, data in events:
        assert data["type"] == name, (name, data)
        if name == "ping":
            continue
        event = model_of(RawMessageStreamEvent).validate_python(data)
        snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=buffers)
        if name == "content_block_start":
            assert open_at is None and data["index"] == blocks, data
            open_at, blocks = blocks, blocks + 1
        elif name == "content_block_delta":
            assert data["index"] == open_at, data
            assert data["delta"]["type"] in _DELTAS[snapshot.content[open_at].type], data
        elif name == "content_block_stop":
            assert data["index"] == open_at, data
            open_at = None
    names = [name for name, _ in events if name != "ping"]
    assert names[0] == "message_start" and names[-2:] == ["message_delta", "message_stop"], names
    assert open_at is None
    assert names.count("message_delta") == names.count("message_stop") == 1
    whole: dict[str, Any] = snapshot.to_dict()
    return whole
