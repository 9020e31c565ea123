"""LiteLLM's streams: bytes cut anywhere, and streams in streams, whose outer ones close none."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from typing import Any

from proxy_ext.frozen.provider import Event

_MAX_DEPTH = 6
"""Of streams in one another."""


async def sse(source: Any) -> AsyncGenerator[Event]:
    """Of bytes that are cut anywhere."""
    rest = b""
    async for piece in source:
        if isinstance(piece, dict):
            yield piece
            continue
        rest += piece.encode() if isinstance(piece, str) else piece
        *whole, rest = rest.replace(b"\r\n", b"\n").split(b"\n\n")
        for event in whole:
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines and lines != [b"[DONE]"]:
                yield json.loads(b"\n".join(lines))


def with_reasons(source: Any) -> Iterator[Any]:
    """Those that know whether the provider has said why its answer ended."""
    for stream in _nested(source):
        if hasattr(stream, "received_finish_reason"):
            yield stream


def _nested(source: Any) -> Iterator[Any]:
    """A stream and those that it reads from."""
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


async def close(source: Any) -> None:
    """End the provider's answer, however many streams are around it: the outer ones need not."""
    if source is None:
        return
    for stream in reversed(list(_nested(source))):
        for name in ("aclose", "close"):
            end = getattr(stream, name, None)
            if end is None:
                continue
            with suppress(Exception):
                done = end()
                if hasattr(done, "__await__"):
                    await done
            break
