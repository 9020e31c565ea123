"""The requests and answers of an agent in each API, for `proxy.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson
from gateways import Contender, Message

PATHS = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
_ENDS = {
    "chat": b"data: [DONE]",
    "responses": b'"response.completed"',
    "messages": b'"message_stop"',
}


@dataclass(slots=True)
class Talk:
    """One conversation and its session's key."""

    session: str
    key: str
    system: str
    said: list[Any]
    """Messages, or items, in the API's own form."""


def body_of(contender: Contender, talk: Talk, size: int, *, stream: bool) -> bytes:
    """Return a request's body."""
    body: dict[str, Any] = {"model": contender.model}
    match contender.api:
        case "chat":
            system = {"role": "system", "content": talk.system}
            body |= {"messages": [system, *talk.said], "max_tokens": size}
        case "responses":
            body |= {"instructions": talk.system, "input": talk.said, "max_output_tokens": size}
        case "messages":
            body |= {"system": talk.system, "messages": talk.said, "max_tokens": size}
    if stream:
        body["stream"] = True
    if contender.logprobs:
        body["logprobs"] = True
    return orjson.dumps(body)


def added(contender: Contender, answer: bytes) -> list[Message]:
    """Return the part of an answer that an agent appends, unchanged."""
    body = orjson.loads(answer)
    match contender.api:
        case "chat":
            content = body["choices"][0]["message"]["content"]
            return [{"role": "assistant", "content": content}]
        case "responses":
            return list(body["output"])
        case "messages":
            return [{"role": "assistant", "content": body["content"]}]


def ended(contender: Contender, stream: bytes) -> bool:
    """Return True if a stream came to its end."""
    return _ENDS[contender.api] in stream
