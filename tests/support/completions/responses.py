"""Requests of `/v1/responses` to parse, and answers of it to look at."""

from __future__ import annotations

from typing import Any

import orjson
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from any_agent.completions.params.call import ParseSettings
from any_agent.completions.responses.parse import ResponsesCall, parse_responses
from any_agent.types import GenerationHyperparameters, SessionMode

RUN = GenerationHyperparameters(max_new_tokens=100)
_EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
_ANSWERS = TypeAdapter(Response)


def parse(
    input: Any = "hi", *, mode: str = "train", refuses: bool = False, **fields: Any
) -> ResponsesCall:
    """``refuses``: unknown parameters are not recorded."""
    unknown: Any = "refuse" if refuses else "record"
    settings = ParseSettings(SessionMode(mode), RUN, "policy", unknown=unknown)
    return parse_responses({"input": input, **fields}, settings, context_length=1000)


def valid_response(body: bytes | dict[str, Any]) -> Response:
    """The answer, by the SDK's own model; nothing is coerced."""
    data = body if isinstance(body, dict) else orjson.loads(body)
    return _ANSWERS.validate_json(orjson.dumps(data), strict=True)


def valid_events(stream: bytes) -> list[dict[str, Any]]:
    """The events of a stream, each by the SDK's own model, numbered without a gap."""
    events = []
    said = [text for text in stream.decode().split("\n\n") if text and text[0] != ":"]
    for k, text in enumerate(said):
        name, data = text.split("\n")
        event = orjson.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == k
        _EVENTS.validate_json(orjson.dumps(event), strict=True)
        events.append(event)
    return events
