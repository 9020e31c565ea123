"""The load on a router: keep-alive connections on httptools, cheap enough to share its machine."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools
import orjson

SDK_HEADERS = (
    b"accept: application/json\r\naccept-encoding: gzip, deflate\r\n"
    b"user-agent: AsyncOpenAI/Python 2.54.0\r\nx-stainless-arch: x64\r\n"
    b"x-stainless-async: async:asyncio\r\nx-stainless-lang: python\r\nx-stainless-os: Linux\r\n"
    b"x-stainless-package-version: 2.54.0\r\nx-stainless-read-timeout: 600\r\n"
    b"x-stainless-retry-count: 0\r\nx-stainless-runtime: CPython\r\n"
    b"x-stainless-runtime-version: 3.11.7\r\n"
)
"""The headers that OpenAI's client sends with every call."""
_SENT = slice(len(b'data: {"sent":"'), len(b'data: {"sent":"') + 19)
_NUMBER = slice(_SENT.stop + len(b'","number":"'), _SENT.stop + len(b'","number":"') + 6)


def request(key: str, size: int, **fields: float | bool) -> bytes:
    """Return a chat call of about ``size`` bytes of body; ``fields`` control the upstream."""
    body = {
        "model": "policy",
        "messages": [{"role": "user", "content": "w" * (size - 100)}],
        **fields,
    }
    data = orjson.dumps(body)
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
        b"authorization: Bearer %b\r\ncontent-type: application/json\r\n%b"
        b"content-length: %d\r\n\r\n%b" % (key.encode(), SDK_HEADERS, len(data), data)
    )


@dataclass(slots=True)
class Answer:
    """The answer to one request."""

    status: int = 0
    size: int = 0
    complete: bool = False
    """True if the message ended as HTTP requires, not by a closed connection."""
    events: int = 0
    """True if the events came in order and once each."""
    done: bool = False
    """True if the stream's own end was seen."""
    late: list[int] = field(default_factory=list)
    """Nanoseconds between each event's writing and its reading."""

    def whole_stream(self, events: int) -> bool:
        return self.status == 200 and self.complete and self.done and self.events == events


class Connection(asyncio.Protocol):
    """A connection that sends one request at a time."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[Answer] | None = None
        self._now = 0

    async def call(self, data: bytes) -> Answer:
        """Send a request; return its answer, even one that was cut off."""
        assert self._waiter is None
        self._answer = Answer()
        self._rest = b""
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        return await self._waiter

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: Any) -> None:
        self._transport: asyncio.Transport = transport  # uvloop's is no subclass

    def connection_lost(self, _: Exception | None) -> None:
        self._finish()

    def data_received(self, data: bytes) -> None:
        self._now = time.monotonic_ns()
        self._parser.feed_data(data)

    def on_headers_complete(self) -> None:
        self._answer.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        answer = self._answer
        answer.size += len(body)
        *events, self._rest = (self._rest + body).split(b"\n\n")
        for event in events:
            if event == b"data: [DONE]":
                answer.done = True
            elif int(event[_NUMBER]) == answer.events:
                answer.events += 1
                answer.late.append(self._now - int(event[_SENT]))

    def on_message_complete(self) -> None:
        self._answer.complete = True
        self._finish()

    def _finish(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(self._answer)
        self._waiter = None


@contextlib.asynccontextmanager
async def connections(urls: Sequence[str], count: int) -> AsyncIterator[list[Connection]]:
    """Open ``count`` connections, to the servers in turn."""
    loop = asyncio.get_running_loop()
    servers = itertools.cycle(urlsplit(url) for url in urls)
    opened: list[Connection] = []
    try:
        for parts in itertools.islice(servers, count):
            _, connection = await loop.create_connection(
                Connection, parts.hostname or "", parts.port or 80
            )
            opened.append(connection)
        yield opened
    finally:
        for connection in opened:
            connection.close()
