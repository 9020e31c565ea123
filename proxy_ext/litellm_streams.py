"""LiteLLM's answers and streams as JSON. Its streams wrap others, which they do not close."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from typing import Any, TypeAlias

Event: TypeAlias = dict[str, Any]
"""The JSON behind `data:` of one event of a stream."""
_EVENT = re.compile(rb"(\r?\n\r?\n)")
_MAX_DEPTH = 6  # levels of streams in one another


async def stream_events(source: Any) -> AsyncGenerator[Event]:
    """Yield a stream's events, which come as objects or as bytes that are cut anywhere."""
    reader = EventReader()
    async for piece in source:
        if not isinstance(piece, str | bytes):
            yield as_json(piece)
            continue
        for _, event in reader.feed(piece.encode() if isinstance(piece, str) else piece):
            if event is not None:
                yield event


class EventReader:
    """Reads server-sent events from bytes that are cut anywhere."""

    def __init__(self) -> None:
        self.rest = b""
        """The bytes behind the last whole event."""

    def feed(self, piece: bytes) -> Iterator[tuple[bytes, Event | None]]:
        """Yield each further whole event: its bytes, and its JSON; None for one without."""
        *whole, self.rest = _EVENT.split(self.rest + piece)
        for text, gap in zip(whole[::2], whole[1::2], strict=True):
            lines = [line[5:].strip() for line in text.splitlines() if line.startswith(b"data:")]
            data = b"\n".join(lines)
            yield text + gap, json.loads(data) if data and data != b"[DONE]" else None


def as_json(answer: Any) -> dict[str, Any]:
    """Return an answer, or an event, as plain data."""
    if isinstance(answer, dict):
        plain = answer
    else:
        plain = answer.model_dump(mode="json", exclude_unset=True, warnings=False)
        if "choices" in plain:
            # LiteLLM's app does the same: most of its own fields have no value.
            plain = _without_nulls(plain)
    plain.pop("_hidden_params", None)
    return plain


def lacks_finish_reason(source: Any) -> bool:
    """Return True if the provider ended its answer without a reason."""
    return any(
        stream.received_finish_reason is None
        for stream in _nested(source)
        if hasattr(stream, "received_finish_reason")
    )


async def close(source: Any) -> None:
    """End the provider's answer, however many streams wrap it: the outer ones may not close it."""
    if source is None:
        return
    for stream in reversed(list(_nested(source))):
        end = getattr(stream, "aclose", None) or getattr(stream, "close", None)
        if end is not None:
            with suppress(Exception):
                done = end()
                if hasattr(done, "__await__"):
                    await done


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value


def _nested(source: Any) -> Iterator[Any]:
    """Yield a stream and those that it reads from."""
    level, seen = [source], {id(source)}
    for _ in range(_MAX_DEPTH):
        below: list[Any] = []
        for stream in level:
            yield stream
            for value in list(getattr(stream, "__dict__", {}).values()):
                reads = hasattr(value, "__anext__") or hasattr(value, "aiter_bytes")
                if reads and id(value) not in seen:
                    seen.add(id(value))
                    below.append(value)
        level = below
