"""`/v1/chat/completions`."""

from __future__ import annotations

from typing import Any

import orjson

from any_agent.types import Message
from tests.support.laws.apis.given import Asked, Given, events_of


class Chat:
    name = "chat"
    path = "/v1/chat/completions"

    def body(self, asked: Asked) -> dict[str, Any]:
        out = {"model": "m", "messages": list(asked.messages), "stream": asked.stream}
        for name in ("tools", "max_tokens", "stop"):
            if value := getattr(asked, name):
                out[name] = list(value) if name == "stop" else value
        return out | asked.fields

    def whole(self, data: bytes) -> list[Given]:
        body = orjson.loads(data)
        many = len(body["choices"]) > 1
        choices = sorted(body["choices"], key=lambda choice: choice["index"])
        return [
            _given(body["id"], c["index"] if many else None, c["finish_reason"], c["message"], body)
            for c in choices
        ]

    def streamed(self, data: bytes) -> list[Given]:
        events = events_of(data)
        assert events[-1] == (None, None), events[-1]
        out: dict[int, tuple[str, Message]] = {}
        for _, event in events[:-1]:
            for choice in event["choices"]:
                index = choice["index"]
                finish, message = out.get(index, ("", {"role": "assistant"}))
                assert events[0][1]["id"] == event["id"]
                assert not finish, "nothing follows a choice's end"
                _add(message, choice["delta"])
                out[index] = (choice.get("finish_reason") or "", message)
        id, many = events[0][1]["id"], len(out) > 1
        return [
            _given(id, k if many else None, finish, message, {})
            for k, (finish, message) in sorted(out.items())
        ]

    def problem(self, data: Any) -> tuple[str, str, str]:
        return openai_problem(data)


def openai_problem(data: Any) -> tuple[str, str, str]:
    """An error in OpenAI's shape."""
    assert data.keys() == {"error"}, data
    error = data["error"]
    assert {"message", "type", "code", "param"} <= error.keys(), error
    assert isinstance(error["param"], str | None), error
    return error["type"], error["code"], error["message"]


def _given(
    id: str, index: int | None, finish: str, message: Message, whole: dict[str, Any]
) -> Given:
    name = id if index is None else f"{id}.{index}"
    return Given(message, api="chat", interaction=name, finish=finish, raw=message, whole=whole)


def _add(message: Message, delta: dict[str, Any]) -> None:
    for key in ("content", "reasoning_content"):
        if delta.get(key):
            message[key] = (message.get(key) or "") + delta[key]
    for part in delta.get("tool_calls") or []:
        calls = message.setdefault("tool_calls", [])
        if part["index"] == len(calls):
            calls.append(
                {"id": part["id"], "type": "function", "function": {"name": "", "arguments": ""}}
            )
        function = calls[part["index"]]["function"]
        for key in ("name", "arguments"):
            function[key] += (part.get("function") or {}).get(key) or ""
