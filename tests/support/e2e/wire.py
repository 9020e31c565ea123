"""A wire between agents and a service: it can cut every connection, and make requests slow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

_PIECE = 48
_PAUSE = 0.05
"""A slow wire brings so many bytes of a request at a time, in so many seconds."""


class Wire:
    """Forwards TCP connections to one address; see :func:`wire_to`."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None
        self._to = parts.hostname, parts.port
        self.url = ""
        self.slow = False
        """Requests come in small pieces for as long as this is true; answers do not."""
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def cut(self) -> int:
        """End every connection at once, as a network does that fails; return their number."""
        writers = list(self._writers)
        for writer in writers:
            writer.transport.abort()
        return len(writers) // 2

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            onward, out = await asyncio.open_connection(*self._to)
        except OSError:
            self._end(writer)
            return
        self._writers.add(out)
        both = asyncio.gather(self._ask(reader, out), self._answer(onward, writer))
        try:
            with suppress(OSError):
                await both
        finally:
            both.cancel()
            self._end(writer)
            self._end(out)

    def _end(self, writer: asyncio.StreamWriter) -> None:
        self._writers.discard(writer)
        writer.transport.abort()

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            at = 0
            while self.slow and at < len(data):
                writer.write(data[at : at + _PIECE])
                at += _PIECE
                await asyncio.sleep(_PAUSE)
            writer.write(data[at:])
            await writer.drain()
        # Clients that are done close; a half that is closed would be kept open for ever.
        raise ConnectionResetError

    @staticmethod
    async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
        writer.close()
        await writer.wait_closed()


@asynccontextmanager
async def wire_to(url: str) -> AsyncIterator[Wire]:
    """A wire to the service at ``url``, which agents find at the wire's own URL."""
    wire = Wire(url)
    server = await asyncio.start_server(wire.serve, "127.0.0.1", 0, backlog=1024)
    wire.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield wire
    finally:
        server.close()
        wire.cut()
