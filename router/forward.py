"""One request passed on to its rank, and the answer back, byte by byte."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web
from aiohttp.http import StreamWriter

from any_agent.errors import AnyAgentError, InvalidRequest, PayloadTooLarge, ReplyLost
from router.health import Ranks
from router.upstream import NeverSent, Upstream, end_to_end, read_whole

_WHOLE = 65_536
"""Bodies up to so many bytes are read whole; longer ones, and those of unknown length, stream."""
_REPEATABLE = ("GET", "HEAD", "OPTIONS")


class Body:
    """A request's body, bounded in size and in the time between its parts."""

    def __init__(self, request: web.BaseRequest, *, limit: int, timeout: float) -> None:
        self._request = request
        self._content = request.content
        self._limit = limit
        self._timeout = timeout
        self.length = request.content_length
        self.error: AnyAgentError | None = None
        """Why it could not be read."""
        if (self.length or 0) > limit:
            raise self._too_large(limit)

    async def whole(self, limit: int | None = None) -> bytes:
        """All of it; PayloadTooLarge above the limit."""
        limit = min(limit or self._limit, self._limit)
        if (self.length or 0) > limit:
            raise self._too_large(limit)
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
        if self._request.headers.get("Expect", "").lower() == "100-continue":
            await self._request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    async def _part(self) -> bytes:
        content = self._content
        if content.is_eof():
            return content.read_nowait()
        try:
            async with asyncio.timeout(self._timeout):
                return await content.readany()
        except TimeoutError:
            raise InvalidRequest(
                f"no part of the body came for {self._timeout:g} s (server.client_timeout)",
                code="body_timeout",
            ) from None

    def _too_large(self, limit: int) -> PayloadTooLarge:
        name = "server.max_body_bytes, " if limit == self._limit else ""
        return PayloadTooLarge(f"the body is too large: {name}{limit} bytes")


class Forwarder:
    """Passes requests on. Counts what became of them."""

    def __init__(self, upstream: Upstream, ranks: Ranks, *, client_timeout: float) -> None:
        self._upstream = upstream
        self._ranks = ranks
        self._client_timeout = client_timeout
        self._turn = 0

    async def pass_on(
        self,
        request: web.BaseRequest,
        rank: int | None,
        body: Body,
        *,
        content: bytes | None = None,
    ) -> web.StreamResponse:
        """Answer as the rank does, or as any rank does. ``content``: the body, if it was read."""
        headers = end_to_end(request.headers)
        headers.popall("Expect", None)
        if content is None and request.body_exists and (body.length or _WHOLE + 1) <= _WHOLE:
            content = await body.whole()
        deadline = time.monotonic() + self._ranks.wait
        while True:
            to = rank if rank is not None else await self.next_rank(deadline)
            origin = self._ranks.url(to) or await self._ranks.reach(to, deadline)
            data = content if content is not None or not request.body_exists else body.stream()
            try:
                response = await self._upstream.send(
                    request.method, origin, request.raw_path, headers, data
                )
            except NeverSent:
                self._ranks.failed(to)
                continue
            except ReplyLost:
                if body.error is not None:
                    raise body.error from None
                if data is None and self._repeatable(request):
                    continue
                raise
            break
        async with response:
            return await self._answer(request, response)

    @staticmethod
    def _repeatable(request: web.BaseRequest) -> bool:
        return request.method in _REPEATABLE and "start_session" not in request.raw_path

    async def next_rank(self, deadline: float) -> int:
        """The next of the ranks that serve, in turn."""
        live = self._ranks.live or await self._ranks.reach_any(deadline)
        self._turn += 1
        return live[self._turn % len(live)]

    async def _answer(
        self, request: web.BaseRequest, upstream: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        headers = end_to_end(upstream.headers)
        length = upstream.content_length
        if length is not None and length <= _WHOLE:
            body = await read_whole(upstream)
            return await self.answer(
                request,
                web.Response(status=upstream.status, reason=upstream.reason, headers=headers),
                body,
            )
        response = web.StreamResponse(
            status=upstream.status, reason=upstream.reason, headers=headers
        )
        if length is None and request.version < aiohttp.HttpVersion11:
            # Only the connection's end tells such a client where the answer ends.
            response.force_close()
        writer = await response.prepare(request)
        assert isinstance(writer, StreamWriter)
        content = upstream.content
        while True:
            try:
                chunk = await content.readany()
            except (aiohttp.ClientError, OSError):
                # Never ended as if it were complete.
                if request.transport is not None:
                    request.transport.abort()
                return response
            if not chunk:
                break
            await writer.write(chunk, drain=False)
            if request.protocol.writing_paused:
                await self._taken(request, writer)
        writer.set_eof()
        return response

    async def answer(
        self, request: web.BaseRequest, response: web.Response, body: bytes
    ) -> web.StreamResponse:
        """Send a whole answer in one go."""
        writer = await response.prepare(request)
        assert isinstance(writer, StreamWriter)
        if body:
            await writer.write(body, drain=False)
        writer.set_eof()
        if request.protocol.writing_paused:
            await self._taken(request, writer)
        return response

    async def _taken(self, request: web.BaseRequest, writer: StreamWriter) -> None:
        """Wait until the client has taken what was written; cut it off if it takes nothing."""
        transport = request.transport
        if transport is None:
            return
        loop = asyncio.get_running_loop()
        left = transport.get_write_buffer_size()
        timer: asyncio.TimerHandle

        def check() -> None:
            nonlocal left, timer
            now = transport.get_write_buffer_size()
            if now >= left:
                transport.abort()
                return
            left = now
            timer = loop.call_later(self._client_timeout, check)

        timer = loop.call_later(self._client_timeout, check)
        try:
            await writer.drain()
        finally:
            timer.cancel()
