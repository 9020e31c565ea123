"""A router in the test's own loop, over ranks that do what a test tells them to, byte by byte."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx

from any_agent.config import Config
from any_agent.keys import KeySigner
from any_agent.launcher.trial import trial_dir
from any_agent.rundir.registry import PartLoad, RegistryEntry, publish, rank_name
from router.app import Router, running_router
from tests.support.proxy import LIMIT, config_for

OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
END = b"0\r\n\r\n"


@dataclass
class Received:
    """One request as a rank got it."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name.lower()]

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    async def answer(
        self, data: Any = None, *, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        """A whole answer, as JSON."""
        body = json.dumps({} if data is None else data).encode()
        lines = [f"HTTP/1.1 {status} Whatever", f"content-length: {len(body)}"]
        lines += [f"{key}: {value}" for key, value in (headers or {}).items()]
        await self.send("\r\n".join([*lines, "", ""]).encode() + body)

    async def begin(self, *lines: str) -> None:
        """The head of a chunked answer."""
        head = ["HTTP/1.1 200 OK", "transfer-encoding: chunked", *lines, "", ""]
        await self.send("\r\n".join(head).encode())

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%s\r\n" % (len(data), data))

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    def die(self) -> None:
        """As a killed process does: the connection ends at once."""
        self.writer.transport.abort()


Handler = Callable[[Received], Awaitable[None]]


async def answer_empty(received: Received) -> None:
    await received.answer()


async def die(received: Received) -> None:
    received.die()


async def never(received: Received) -> None:
    """Take a request and never answer, as a stopped process does."""
    await asyncio.Event().wait()


def says(data: Any = None, *, status: int = 200, headers: dict[str, str] | None = None) -> Handler:
    async def handler(received: Received) -> None:
        await received.answer(data, status=status, headers=headers)

    return handler


def refuses(code: str, status: int, headers: dict[str, str] | None = None) -> Handler:
    return says({"error": {"message": "no", "code": code}}, status=status, headers=headers)


def sends(data: bytes) -> Handler:
    async def handler(received: Received) -> None:
        await received.send(data)

    return handler


def once_set(go: asyncio.Event) -> Handler:
    """Answer once the event is set."""

    async def handler(received: Received) -> None:
        await go.wait()
        await received.answer()

    return handler


class FakeRank:
    """A rank's HTTP side. ``handler`` answers; what arrived is kept."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.received: list[Received] = []
        self.handler: Handler = answer_empty
        self.connections = 0
        self.left = asyncio.Event()
        """Set once the router has ended a connection that a handler was at work on."""
        self.port = 0
        self.boots = 0
        self.load = PartLoad()
        self.version = 0
        self.engine_up = True
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def up(self) -> bool:
        return self._server is not None

    @property
    def open(self) -> int:
        """The number of connections now."""
        return len(self._writers)

    async def start(self) -> None:
        """Listen, after a restart where it listened before."""
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", self.port, reuse_address=True
        )
        self.port = self._server.sockets[0].getsockname()[1]
        self.boots += 1

    async def kill(self) -> None:
        """Die: nobody listens, and every connection ends."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    def entry(self) -> RegistryEntry:
        return RegistryEntry(
            name=rank_name(self.number),
            boot_id=f"boot-{self.boots}",
            url=self.url,
            pid=1,
            version=self.version,
            load=self.load,
            engine_up=self.engine_up,
        )

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            while True:
                received = await self._read(reader, writer)
                self.received.append(received)
                await self._handle(received)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _handle(self, received: Received) -> None:
        """Run the handler, watching for the router's leaving."""
        work = asyncio.ensure_future(self.handler(received))
        gone = asyncio.ensure_future(received.reader.read(1))
        try:
            await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ConnectionResetError
            await work
        except ConnectionError:
            self.left.set()
            raise
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    @staticmethod
    async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Received:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.split("\r\n")[:-2]
        method, target, _ = first.split(" ")
        headers = [(k, v.strip()) for k, _, v in (line.partition(":") for line in lines)]
        named = {k.lower(): v for k, v in headers}
        body = b""
        if "chunked" in named.get("transfer-encoding", ""):
            while size := int(await reader.readline(), 16):
                body += await reader.readexactly(size)
                await reader.readexactly(2)
            await reader.readexactly(2)
        elif "content-length" in named:
            body = await reader.readexactly(int(named["content-length"]))
        return Received(method, target, headers, body, reader, writer)


@dataclass
class Lab:
    """A running router, the ranks behind it, and a client of it."""

    config: Config
    ranks: list[FakeRank]
    router: Router
    port: int
    http: httpx.AsyncClient
    silent: set[int] = field(default_factory=set)
    """Ranks that write nothing to the registry."""

    @property
    def signer(self) -> KeySigner:
        return KeySigner(trial_dir(self.config).signing_secret())

    @property
    def registry(self) -> Path:
        return trial_dir(self.config).registry

    def key(self, rank: int) -> str:
        return self.signer.mint(rank)[1]

    async def get(self, path: str, key: str | None = None, **headers: str) -> httpx.Response:
        return await self.http.get(path, headers=bearer(key) | headers)

    async def post(
        self, path: str, body: Any = None, key: str | None = None, **headers: str
    ) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        return await self.http.post(path, content=content, headers=bearer(key) | headers)

    async def connect(self, *, receive_buffer: int | None = None) -> Wire:
        """A raw connection to the router."""
        raw = socket.socket()
        if receive_buffer is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        raw.setblocking(False)
        await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", self.port))
        return Wire(*await asyncio.open_connection(sock=raw))

    async def raw(
        self,
        request: str = "GET /v1/x",
        *lines: str,
        body: bytes | None = None,
        version: str = "1.1",
        receive_buffer: int | None = None,
    ) -> Wire:
        """A raw connection on which a request has been sent, with these headers."""
        length = [] if body is None else [f"Content-Length: {len(body)}"]
        head = [f"{request} HTTP/{version}", "Host: localhost", *lines, *length, "", ""]
        wire = await self.connect(receive_buffer=receive_buffer)
        return await wire.send("\r\n".join(head).encode() + (body or b""))

    def tell(self) -> None:
        """What the ranks would write to the registry now."""
        for rank in self.ranks:
            if rank.up and rank.number not in self.silent:
                publish(self.registry, rank.entry())

    def handle(self, *handlers: Handler) -> None:
        """Have the ranks answer by these, in their order; by one alone, all of them."""
        each = handlers if len(handlers) > 1 else handlers * len(self.ranks)
        for rank, handler in zip(self.ranks, each, strict=True):
            rank.handler = handler

    async def restart(self, rank: FakeRank) -> None:
        await rank.start()
        self.tell()


def bearer(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key is not None else {}


def refusal(response: httpx.Response) -> tuple[int, str]:
    """The status and the code of an error."""
    return response.status_code, response.json()["error"]["code"]


@dataclass
class Wire:
    """A client of bytes."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> Self:
        self.writer.write(data)
        await self.writer.drain()
        return self

    async def head(self) -> str:
        async with asyncio.timeout(LIMIT):
            return (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")

    async def take(self, count: int) -> bytes:
        async with asyncio.timeout(LIMIT):
            return await self.reader.readexactly(count)

    async def rest(self) -> tuple[bytes, bool]:
        """Everything until the end, and whether the connection was reset."""
        data = b""
        async with asyncio.timeout(LIMIT):
            try:
                while part := await self.reader.read(65536):
                    data += part
            except ConnectionResetError:
                return data, True
        return data, False

    def close(self) -> None:
        self.writer.transport.abort()


@asynccontextmanager
async def running_lab(root: Path, *settings: str, ranks: int = 1) -> AsyncIterator[Lab]:
    """A router over fake ranks that are all up."""
    config = config_for(root, f"server.ranks={ranks}", *settings)
    trial_dir(config).create()
    fakes = [FakeRank(number) for number in range(ranks)]
    async with AsyncExitStack() as stack:
        for rank in fakes:
            await rank.start()
            stack.push_async_callback(rank.kill)
            publish(trial_dir(config).registry, rank.entry())
        router, port = await stack.enter_async_context(serving(config))
        http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT)
        lab = Lab(config, fakes, router, port, await stack.enter_async_context(http))
        beat = asyncio.create_task(_beat(lab))
        stack.callback(beat.cancel)
        yield lab


async def _beat(lab: Lab) -> None:
    while True:
        lab.tell()
        await asyncio.sleep(0.2)


@asynccontextmanager
async def serving(
    config: Config, port: int = 0, url: str | None = None
) -> AsyncIterator[tuple[Router, int]]:
    """A router of the run, and its port; ``url``: where the world reaches it."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    port = listener.getsockname()[1]
    async with running_router(config, listener, url or f"http://127.0.0.1:{port}") as router:
        yield router, port
