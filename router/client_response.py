"""Answers to clients, each of whom must take what is written for it, or is cut off."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import orjson
from aiohttp import hdrs, web
from aiohttp.http import HttpVersion11, StreamWriter
from multidict import CIMultiDict

from any_agent.completions.apis import encode_error
from any_agent.errors import AnyAgentError
from any_agent.protocol.rl import API_HEADER, API_VERSION
from router.body import WHOLE
from router.upstream import RankResponse, end_to_end

SERVER = "any-agent"
"""Not the library and its version."""


class ClientResponder:
    """``timeout``: seconds after which a client that takes no byte is cut off.

    Writing pauses on a client's connection as soon as it takes no more (`app.py` sees to that), so
    that this is felt here and nothing piles up.
    """

    def __init__(self, *, timeout: float) -> None:
        self._timeout = timeout
        self.broken = 0
        """Answers that their rank did not finish; so their clients' connections were aborted."""
        self.cut = 0
        """Clients that took nothing for too long."""

    async def whole(
        self,
        request: web.BaseRequest,
        status: int,
        headers: CIMultiDict[str],
        body: bytes,
        *,
        reason: str | None = None,
    ) -> web.StreamResponse:
        """An answer that is there already, in one go."""
        response = web.Response(status=status, reason=reason, headers=headers)
        writer = await _begun(response, request)
        if body:
            await writer.write(body, drain=False)
        return await self._ended(request, response, writer)

    async def json(
        self,
        request: web.BaseRequest,
        data: Any,
        *,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> web.StreamResponse:
        """An answer of the router's own."""
        body = orjson.dumps(data)
        head = CIMultiDict(headers or {})
        head["Content-Type"] = "application/json"
        head["Content-Length"] = str(len(body))
        if "/rl/" in request.path:
            head[API_HEADER] = API_VERSION
        return await self.whole(request, status, head, b"" if request.method == "HEAD" else body)

    async def error(self, request: web.BaseRequest, error: AnyAgentError) -> web.StreamResponse:
        """An error in the shape of the API that the request is for."""
        body, headers = encode_error(error, request.path)
        return await self.json(request, body, status=error.status, headers=headers)

    async def relay(self, request: web.BaseRequest, upstream: RankResponse) -> web.StreamResponse:
        """A rank's answer; each part of a long one as soon as it is there.

        ReplyLost for a short one that breaks off.
        """
        headers = end_to_end(upstream.headers)
        length = upstream.content_length
        if length is not None and length <= WHOLE:
            body = await upstream.read()
            return await self.whole(request, upstream.status, headers, body, reason=upstream.reason)
        response = web.StreamResponse(
            status=upstream.status, reason=upstream.reason, headers=headers
        )
        if length is None and request.version < HttpVersion11:
            # Only the connection's end tells such a client where the answer ends.
            response.force_close()
        writer = await _begun(response, request)
        protocol = request.protocol
        while True:
            try:
                chunk = await upstream.readany()
            except AnyAgentError:
                # Never ended as if it were complete.
                self.broken += 1
                if request.transport is not None:
                    request.transport.abort()
                return response
            if not chunk:
                return await self._ended(request, response, writer)
            await writer.write(chunk, drain=False)
            if protocol.writing_paused:
                await self._taken(request, writer)

    async def _ended(
        self, request: web.BaseRequest, response: web.StreamResponse, writer: StreamWriter
    ) -> web.StreamResponse:
        writer.set_eof()
        if request.protocol.writing_paused:
            await self._taken(request, writer)
        return response

    async def _taken(self, request: web.BaseRequest, writer: StreamWriter) -> None:
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


async def _begun(response: web.StreamResponse, request: web.BaseRequest) -> StreamWriter:
    response.headers.setdefault(hdrs.SERVER, SERVER)
    writer = await response.prepare(request)
    # Its own type has neither writing without waiting nor ending without it.
    assert isinstance(writer, StreamWriter)
    return writer
