"""The ranks behind every router: they answer at once, or stream stamped events at a steady pace.

Raw asyncio protocols, so that they take little of the core that they share with the load.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from typing import Any

import httptools
import orjson
import uvloop

ANSWER = orjson.dumps(
    {
        "id": "chatcmpl-canned",
        "object": "chat.completion",
        "created": 1,
        "model": "policy",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "word " * 360},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 400, "completion_tokens": 360, "total_tokens": 760},
    }
)
WHOLE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
    len(ANSWER),
    ANSWER,
)
HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    b"cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"
)
EVENT = (
    b'data: {"sent":"%019d","number":"%06d","id":"chatcmpl-canned","created":1,"model":"policy",'
    b'"object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":" word"},'
    b'"finish_reason":null}]}\n\n'
)
"""``sent`` is this machine's monotonic clock in ns; both fields have a fixed place."""


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Upstream(asyncio.Protocol):
    """One connection. A body with ``stream`` gets ``events`` events, ``gap`` seconds apart."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._body = bytearray()
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport: asyncio.Transport = transport  # uvloop's is no subclass

    def connection_lost(self, _: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        asked = orjson.loads(self._body or b"{}")
        self._body.clear()
        if not asked.get("stream"):
            self._transport.write(WHOLE)
            return
        self._transport.write(HEAD)
        # Streams that begin together do not beat together.
        begin = self._loop.time() + random.random() * asked["gap"]
        self._timer = self._loop.call_at(
            begin, self._event, begin, 0, asked["events"], asked["gap"]
        )

    def _event(self, begin: float, number: int, events: int, gap: float) -> None:
        if number == events:
            self._transport.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
            return
        self._transport.write(_chunk(EVENT % (time.monotonic_ns(), number)))
        due = begin + (number + 1) * gap
        self._timer = self._loop.call_at(due, self._event, begin, number + 1, events, gap)


async def serve(ports: list[int]) -> None:
    loop = asyncio.get_running_loop()
    for port in ports:
        await loop.create_server(Upstream, "127.0.0.1", port, backlog=2048)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ports", type=int, nargs="+", required=True)
    uvloop.run(serve(parser.parse_args().ports))


if __name__ == "__main__":
    main()
