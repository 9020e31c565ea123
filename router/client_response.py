"""Answers to clients; a client that stops reading its answer is cut off."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import orjson
from aiohttp import ClientConnectionError, hdrs, web
from aiohttp.http import HttpVersion11, StreamWriter
from multidict import CIMultiDict

from any_agent.completions.apis import encode_error
from any_agent.errors import AnyAgentError
from any_agent.protocol.rl import API_HEADER, API_VERSION
from any_agent.runtime.bounded_server import is_crowded
from router.body import MAX_SHORT_BYTES
from router.upstream import RankResponse, end_to_end

SERVER = "any-agent"  # instead of the HTTP library and its version


class ClientResponder:
    """Sends answers; it cuts off a client that takes no byte for ``timeout`` seconds.

    `app.py` lets writing pause as soon as a client takes no more, so nothing piles up here.
    """

    def __init__(self, *, timeout: float) -> None:
        self._timeout = timeout
        self.broken = 0
        """Number of answers that their rank did not finish, so that the client was disconnected."""
        self.cut = 0
        """Number of clients that were cut off because they took nothing for too long."""

    async def send(
        self,
        request: web.BaseRequest,
        status: int,
        headers: CIMultiDict[str],
        body: bytes,
        *,
        reason: str | None = None,
    ) -> web.StreamResponse:
        """Send a complete answer."""
        response = web.Response(status=status, reason=reason, headers=headers)
        writer = await _start(response, request)
        if body:
            await writer.write(body, drain=False)
        return await self._finish(request, response, writer)

    async def json(
        self,
        request: web.BaseRequest,
        data: Any,
        *,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> web.StreamResponse:
        """Send an answer of the router's own."""
        body = orjson.dumps(data)
        head = CIMultiDict(headers or {})
        head["Content-Type"] = "application/json"
        head["Content-Length"] = str(len(body))
        if "/rl/" in request.path:
            head[API_HEADER] = API_VERSION
        return await self.send(request, status, head, b"" if request.method == "HEAD" else body)

    async def error(self, request: web.BaseRequest, error: AnyAgentError) -> web.StreamResponse:
        """Send an error as the API of the request's path encodes it."""
        body, headers = encode_error(error, request.path)
        return await self.json(request, body, status=error.status, headers=headers)

    async def relay(self, request: web.BaseRequest, upstream: RankResponse) -> web.StreamResponse:
        """Send a rank's answer, a long one part by part as it arrives.

        ReplyLost for a short one that breaks off.
        """
        headers = end_to_end(upstream.headers)
        length = upstream.content_length
        if length is not None and length <= MAX_SHORT_BYTES:
            body = await upstream.read()
            return await self.send(request, upstream.status, headers, body, reason=upstream.reason)
        response = web.StreamResponse(
            status=upstream.status, reason=upstream.reason, headers=headers
        )
        if length is None and request.version < HttpVersion11:
            # For such a client the answer ends where the connection ends.
            response.force_close()
        writer = await _start(response, request)
        if not upstream.begun:
            # aiohttp keeps the head for the first part, which may take long to come.
            writer.send_headers()
        protocol = request.protocol

        def push(part: bytes) -> bool:
            if protocol.writing_paused:
                return False
            try:
                # Without a drain it never waits, so that its first step is its last.
                writer.write(part, drain=False).send(None)
            except StopIteration:
                return True
            except ClientConnectionError:
                return False
            raise RuntimeError("writing without a drain has waited")

        while True:
            try:
                chunk = await upstream.readany(push)
            except AnyAgentError:
                # An incomplete answer must not end like a complete one.
                self.broken += 1
                if request.transport is not None:
                    request.transport.abort()
                return response
            if not chunk:
                return await self._finish(request, response, writer)
            await writer.write(chunk, drain=False)
            if protocol.writing_paused:
                await self.drain(request, writer)

    async def _finish(
        self, request: web.BaseRequest, response: web.StreamResponse, writer: StreamWriter
    ) -> web.StreamResponse:
        writer.set_eof()
        if request.protocol.writing_paused:
            await self.drain(request, writer)
        return response

    async def drain(self, request: web.BaseRequest, writer: StreamWriter) -> None:
        """Wait until the client has taken what was written."""
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
                self.cut += 1
                transport.abort()
                return
            left = now
            timer = loop.call_later(self._timeout, check)

        timer = loop.call_later(self._timeout, check)
        try:
            await writer.drain()
        finally:
            timer.cancel()


async def _start(response: web.StreamResponse, request: web.BaseRequest) -> StreamWriter:
    if is_crowded(request):
        response.force_close()
    response.headers.setdefault(hdrs.SERVER, SERVER)
    writer = await response.prepare(request)
    # AbstractStreamWriter can neither write nor end without waiting.
    assert isinstance(writer, StreamWriter)
    return writer
