"""A request's body, bounded in size and in the time between its parts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import orjson
from aiohttp import hdrs, web
from aiohttp.http import HttpVersion11

from any_agent.errors import AnyAgentError, InvalidRequest, PayloadTooLarge

WHOLE = 65_536
"""Bodies of up to so many bytes are read whole; longer ones, and of unknown length, stream."""


class Body:
    """PayloadTooLarge for one that says that it is larger than ``limit`` bytes."""

    def __init__(self, request: web.BaseRequest, *, limit: int, timeout: float) -> None:
        self._request = request
        self._content = request.content
        self._limit = limit
        self._timeout = timeout
        length = request.content_length
        if length is not None and length > limit:
            raise self._too_large(limit)
        self.short = length is not None and length <= WHOLE
        """Known to be short, or that there is none."""
        self.error: AnyAgentError | None = None
        """Why it broke off, if it did."""

    async def whole(self, limit: int | None = None) -> bytes:
        """All of it; PayloadTooLarge above the limit."""
        limit = min(limit or self._limit, self._limit)
        if (self._request.content_length or 0) > limit:
            raise self._too_large(limit)
        if self._content.is_eof():
            # It came together with the head, as most do.
            content = self._content.read_nowait()
            if len(content) > limit:
                raise self._too_large(limit)
            return content
        await self._go_on()
        parts: list[bytes] = []
        size = 0
        while part := await self._part():
            size += len(part)
            if size > limit:
                raise self._too_large(limit)
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def stream(self) -> AsyncIterator[bytes]:
        """Part by part, as it arrives."""
        try:
            await self._go_on()
            size = 0
            while part := await self._part():
                size += len(part)
                if size > self._limit:
                    raise self._too_large(self._limit)
                yield part
        except AnyAgentError as error:
            self.error = error
            raise

    async def _go_on(self) -> None:
        """Tell a client that waits for it to send the body."""
        request = self._request
        if (
            request.headers.get(hdrs.EXPECT, "").lower() == "100-continue"
            and request.version >= HttpVersion11
        ):
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            # Nothing of the answer was sent so far.
            request.writer.output_size = 0

    async def _part(self) -> bytes:
        content = self._content
        if content.is_eof():
            return content.read_nowait()
        try:
            async with asyncio.timeout(self._timeout):
                return await content.readany()
        except TimeoutError:
            raise InvalidRequest(
                f"no part of the body came for {self._timeout:g} s", code="body_timeout"
            ) from None

    def _too_large(self, limit: int) -> PayloadTooLarge:
        where = " (server.max_body_bytes)" if limit == self._limit else ""
        return PayloadTooLarge(f"the body exceeds {limit} bytes{where}")


def json_object(content: bytes) -> dict[str, Any] | None:
    """A body's object; None for anything else, which a rank will find the words for."""
    try:
        data = orjson.loads(content) if content else {}
    except orjson.JSONDecodeError:
        return None
    return data if isinstance(data, dict) else None


def dumped(fields: dict[str, Any]) -> bytes:
    """A body that was read and changed; InvalidRequest if it is nested too deep to be written."""
    try:
        return orjson.dumps(fields)
    except TypeError:
        raise InvalidRequest("the body is nested too deep", code="too_deep") from None


def seconds(value: Any) -> float | None:
    """A number of seconds; None for what is none."""
    if value is None:
        return 0.0
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if 0 <= number < float("inf") else None
