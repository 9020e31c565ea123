"""`/v1/responses`, read by OpenAI's SDK."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent

from any_agent.types import Message
from tests.support.laws.apis.chat import openai_problem
from tests.support.laws.apis.given import (
    Asked,
    Given,
    events_of,
    leading_system,
    model_of,
    text_of,
)

_ENDS = ("response.completed", "response.incomplete")
_FINISH = {"max_output_tokens": "length", "content_filter": "content_filter"}


class Responses:
    name = "responses"
    path = "/v1/responses"

    def body(self, asked: Asked) -> dict[str, Any]:
        system, rest = leading_system(asked.messages)
        out: dict[str, Any] = {"model": "m", "stream": asked.stream}
        if system is not None:
            out["instructions"] = system
        if asked.previous:
            at = last_response(rest)
            assert at is not None
            out["previous_response_id"] = rest[at].interaction  # type: ignore[attr-defined]
            rest = rest[at + 1 :]
        out["input"] = items_of(rest)
        if asked.tools:
            out["tools"] = [{"type": "function", **tool["function"]} for tool in asked.tools]
        if asked.max_tokens is not None:
            out["max_output_tokens"] = asked.max_tokens
        assert not asked.stop, "this API has no stop strings"
        return out | asked.fields

    def whole(self, data: bytes) -> list[Given]:
        body = orjson.loads(data)
        model_of(Response).validate_python(body, strict=True)
        return [given(body)]

    def streamed(self, data: bytes) -> list[Given]:
        return [given(accumulated(events_of(data)))]

    def problem(self, data: Any) -> tuple[str, str, str]:
        return openai_problem(data)


def last_response(messages: Sequence[Message]) -> int | None:
    """Where the last answer stands that this API gave."""
    found = [k for k, m in enumerate(messages) if isinstance(m, Given) and m.api == Responses.name]
    return found[-1] if found else None


def items_of(messages: Sequence[Message]) -> list[Any]:
    """Input items that say what chat messages do."""
    out: list[Any] = []
    for message in messages:
        if isinstance(message, Given) and message.api == "responses":
            out += message.raw
        elif message["role"] == "tool":
            id, said = message["tool_call_id"], text_of(message["content"])
            out.append({"type": "function_call_output", "call_id": id, "output": said})
        elif message["role"] == "assistant":
            calls = message.get("tool_calls") or []
            text = text_of(message.get("content"))
            if text or not calls:
                out.append({"role": "assistant", "content": text})
            out += [
                {"type": "function_call", "call_id": call["id"], **call["function"]}
                for call in calls
            ]
        else:
            out.append({"role": message["role"], "content": text_of(message["content"])})
    return out


def given(body: dict[str, Any]) -> Given:
    """The answer of one response object."""
    assert body["object"] == "response" and body["error"] is None
    message: Message = {"role": "assistant"}
    calls = []
    for item in body["output"]:
        if item["type"] == "message":
            for part in item["content"]:
                message["content"] = message.get("content", "") + part["text"]
        elif item["type"] == "reasoning":
            for part in item["content"]:
                message["reasoning_content"] = message.get("reasoning_content", "") + part["text"]
        else:
            assert item["type"] == "function_call", item
            function = {"name": item["name"], "arguments": item["arguments"]}
            calls.append({"id": item["call_id"], "type": "function", "function": function})
    if calls:
        message["tool_calls"] = calls
    if body["status"] == "incomplete":
        finish = _FINISH[body["incomplete_details"]["reason"]]
    else:
        assert body["status"] == "completed" and body["incomplete_details"] is None
        finish = "tool_calls" if calls else "stop"
    return Given(
        message,
        api="responses",
        interaction=body["id"],
        finish=finish,
        raw=body["output"],
        whole=body,
    )


def accumulated(events: Sequence[tuple[str | None, Any]]) -> dict[str, Any]:
    """What a stream comes to: its last event's response, which all that came before agrees with."""
    state: Any = ResponseStreamState(input_tools=omit, text_format=omit)
    pieces = _Pieces()
    for number, (name, data) in enumerate(events):
        assert data["type"] == name, (name, data)
        assert data["sequence_number"] == number
        event = model_of(ResponseStreamEvent).validate_python(data)
        state.handle_event(event)
        pieces.see(data)
    assert [name for name, _ in events[:2]] == ["response.created", "response.in_progress"]
    for _, data in events[:2]:
        assert data["response"]["status"] == "in_progress" and data["response"]["output"] == []
    last = events[-1][1]
    assert last["type"] in _ENDS, last
    assert not any(name in _ENDS for name, _ in events[:-1])
    body: dict[str, Any] = last["response"]
    assert {data["response"]["id"] for _, data in events if "response" in data} == {body["id"]}
    pieces.require(body["output"])
    # What the SDK put together from the deltas alone.
    snapshot = state._ResponseStreamState__current_snapshot
    assert _sdk_texts(snapshot.output) == _sdk_texts(
        model_of(Response).validate_python(body).output
    )
    return body


class _Pieces:
    """Puts items together from deltas, and holds the order of their events."""

    def __init__(self) -> None:
        self._items: list[dict[str, Any]] = []
        self._open: list[int] = []
        """Items that have begun and not ended."""
        self._texts: dict[tuple[int, int], str] = {}
        self._parts_done: set[tuple[int, int]] = set()
        self._arguments: dict[int, str] = {}

    def see(self, event: dict[str, Any]) -> None:
        kind = event["type"].removeprefix("response.")
        if kind in ("created", "in_progress", "completed", "incomplete"):
            return
        at = event["output_index"]
        if kind == "output_item.added":
            assert at == len(self._items) and not self._open, event
            self._items.append(event["item"])
            self._open.append(at)
            return
        item = self._items[at]
        assert self._open == [at], "an item's events lie between its beginning and its end"
        if kind == "output_item.done":
            assert {"id": item["id"], "type": item["type"]}.items() <= event["item"].items()
            self._items[at] = event["item"]
            self._open.remove(at)
            return
        assert event["item_id"] == item["id"]
        place = (at, event.get("content_index", 0))
        part, _, step = kind.rpartition(".")
        if (part, step) == ("content_part", "added"):
            assert place not in self._texts and event["part"]["text"] == ""
            self._texts[place] = ""
        elif (part, step) == ("content_part", "done"):
            assert event["part"]["text"] == self._texts[place]
            self._parts_done.add(place)
        elif part == "function_call_arguments":
            assert item["type"] == "function_call"
            if step == "delta":
                assert event["delta"], "an event that says nothing"
                self._arguments[at] = self._arguments.get(at, "") + event["delta"]
            else:
                assert event["arguments"] == self._arguments.get(at, "")
        else:
            assert part in ("output_text", "reasoning_text"), event
            assert place not in self._parts_done
            if step == "delta":
                assert event["delta"], "an event that says nothing"
                self._texts[place] += event["delta"]
            else:
                assert event["text"] == self._texts[place]

    def require(self, output: list[Any]) -> None:
        """The items are those of the whole answer."""
        assert not self._open
        assert self._items == output
        for at, item in enumerate(output):
            if item["type"] == "function_call":
                assert item["arguments"] == self._arguments.get(at, "")
            for k, part in enumerate(item.get("content") or ()):
                assert part["text"] == self._texts[at, k]


def _sdk_texts(output: Any) -> list[Any]:
    """What OpenAI's SDK keeps of deltas: texts and arguments."""
    return [
        item.arguments
        if item.type == "function_call"
        else [part.text for part in item.content]
        if item.type == "message"
        else None
        for item in output
    ]
