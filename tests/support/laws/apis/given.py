"""What an agent asks and what it is given, whichever API it speaks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import orjson
from pydantic import TypeAdapter

from any_agent.types import Message, Tool


class Given(dict[str, Any]):
    """An answer as a chat message, and as what it was given."""

    def __init__(
        self,
        message: Message,
        *,
        api: str,
        interaction: str,
        finish: str,
        raw: Any,
        whole: dict[str, Any],
    ) -> None:
        """``finish``: as chat completions call it. ``raw``: what an agent of this API sends back.
        ``whole``: the object that the answer is, or came to."""
        super().__init__(message)
        self.api, self.interaction, self.finish = api, interaction, finish
        self.raw, self.whole = raw, whole


@dataclass(frozen=True, slots=True)
class Asked:
    """One call."""

    messages: Sequence[Message]
    tools: list[Tool] | None = None
    stream: bool = False
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    previous: bool = False
    """Whether to name the answer that it goes on from, where the API can, instead of saying all
    that came before."""
    fields: dict[str, Any] = field(default_factory=dict)
    """More, of this API alone."""


class Api(Protocol):
    """One of the APIs."""

    name: str
    path: str

    def body(self, asked: Asked) -> dict[str, Any]:
        """The request's body."""

    def whole(self, data: bytes) -> list[Given]:
        """The choices of a whole answer."""

    def streamed(self, data: bytes) -> list[Given]:
        """Those of a stream, put together by the API's own SDK where it has what does."""

    def problem(self, data: Any) -> tuple[str, str, str]:
        """An error's type, code and message; its shape is checked."""


def events_of(data: bytes) -> list[tuple[str | None, Any]]:
    """Server-sent events, with their names."""
    out: list[tuple[str | None, Any]] = []
    for block in data.split(b"\n\n"):
        if not block.strip() or block.startswith(b":"):
            continue
        name, said = None, []
        for line in block.split(b"\n"):
            kind, _, value = line.partition(b": ")
            assert kind in (b"event", b"data"), line
            if kind == b"event":
                name = value.decode()
            else:
                said.append(value)
        text = b"\n".join(said)
        out.append((name, None if text == b"[DONE]" else orjson.loads(text)))
    return out


def leading_system(messages: Sequence[Message]) -> tuple[str | None, Sequence[Message]]:
    """The system prompt, and what comes after it."""
    if messages and messages[0].get("role") == "system":
        return messages[0]["content"], messages[1:]
    return None, messages


def text_of(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


@cache
def model_of(kind: Any) -> TypeAdapter[Any]:
    """What reads a type of an SDK; made when it is first needed, for it takes long."""
    return TypeAdapter(kind)


def results_of(answer: Message, text: str = "3") -> list[Message]:
    """What the tools that an answer calls say."""
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": text}
        for call in answer.get("tool_calls") or []
    ]
