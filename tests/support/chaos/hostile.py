"""A real service (router, proxy, scripted engine) and a client that sends it whatever it likes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from any_agent.runtime.ports import reserve
from tests.support.chaos.killable import engine_in_thread
from tests.support.real_parts import await_url, process, write_config

ADMIN_KEY = "operator-secret-that-no-file-may-hold"
LIMIT = 60.0
"""Seconds until a test gives up on an answer, or on the end of a connection."""
CLIENT_TIMEOUT = 2.0
"""Seconds that the service waits for the next part of a body."""


@dataclass
class Part:
    """One process: where it listens, and how much memory it takes."""

    name: str
    url: str
    pid: int
    costs: list[tuple[int, str, int, int]] = field(default_factory=list)
    """Of each attack: MiB at the peak, its name, MiB before and after."""

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        assert parts.hostname is not None and parts.port is not None
        return parts.hostname, parts.port

    @property
    def resident(self) -> int:
        """MiB now."""
        return int(psutil.Process(self.pid).memory_info().rss >> 20)

    @property
    def peak(self) -> int:
        """MiB since `forget_peak`."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) >> 10
        raise AssertionError("the kernel tells no peak")

    def forget_peak(self) -> None:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    @property
    def connections(self) -> int:
        """Those of clients; not those to a rank, which are kept for a while."""
        found = psutil.Process(self.pid).net_connections("tcp")
        here = [c for c in found if c.laddr and c.laddr.port == self.address[1]]
        return len([c for c in here if c.status != psutil.CONN_LISTEN])


@dataclass
class Target:
    """The service under attack."""

    folder: Path
    router: Part
    proxy: Part
    admin: httpx.Client
    used_keys: set[str] = field(default_factory=set)
    """Every key that was ever sent, genuine or not: no file may hold one."""

    @property
    def parts(self) -> tuple[Part, Part]:
        return self.router, self.proxy

    def open(self, **fields: Any) -> tuple[str, str]:
        """A session: its id and its key."""
        response = self.admin.post("/rl/v1/start_session", json={"mode": "eval", **fields})
        assert response.status_code == 200, response.text
        data = response.json()
        self.used_keys.add(data["api_key"])
        return data["session_id"], data["api_key"]

    def alive(self) -> None:
        """A well-behaved agent is served as if nothing had happened."""
        session, key = self.open()
        headers = {"Authorization": f"Bearer {key}"}
        body = {"messages": [{"role": "user", "content": "Say a number."}], "max_tokens": 4}
        url = self.router.url
        call = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=LIMIT)
        assert call.status_code == 200, call.text
        ended = httpx.post(f"{url}/rl/v1/finalize", json={}, headers=headers, timeout=LIMIT)
        assert ended.status_code == 200, ended.text
        assert ended.json()["session_id"] == session

    def metrics(self) -> str:
        response = self.admin.get("/metrics")
        assert response.status_code == 200
        return response.text


@contextmanager
def running_target(
    folder: Path,
    model: Path,
    *,
    open_files: int | None = None,
    server: dict[str, Any] | None = None,
    max_wait: float = 0.1,
) -> Iterator[Target]:
    """All parts as processes of their own, their logs in the run's folder."""
    config = write_config(
        folder,
        model,
        server={"ranks": 1, "client_timeout": CLIENT_TIMEOUT} | (server or {}),
        # An open that asks to wait for ever waits for so long.
        sessions={"group_size": 1, "max_wait": max_wait},
    )
    with ExitStack() as stack:
        engine = stack.enter_context(engine_in_thread(model))
        parts: dict[str, Part] = {}
        for name in ("router", "proxy_ext"):
            port = stack.enter_context(closing(reserve("127.0.0.1", 0))).getsockname()[1]
            url = f"http://127.0.0.1:{port}"
            arguments = ["--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
            if name == "proxy_ext":
                arguments += ["--engine-url", engine.url, "--training"]
                arguments += ["--public-url", parts["router"].url]
            log = folder / f"{name}.log"
            environment = {"ANY_AGENT_SERVER__ADMIN_KEY": ADMIN_KEY}
            child = stack.enter_context(
                process(log, name, *arguments, open_files=open_files, **environment)
            )
            await_url(f"{url}/healthz", child, log)
            parts[name] = Part(name.removesuffix("_ext"), url, child.pid)
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        admin = stack.enter_context(
            httpx.Client(base_url=parts["router"].url, headers=headers, timeout=LIMIT)
        )
        deadline = time.monotonic() + LIMIT
        while admin.get("/readyz").status_code != 200:
            assert time.monotonic() < deadline, "the router does not see its rank"
            time.sleep(0.05)
        yield Target(folder, parts["router"], parts["proxy_ext"], admin, {ADMIN_KEY})


@dataclass
class Reply:
    """What came back on a raw connection; status 0: it was closed without an answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """The error, checked to be of our shape."""
        assert self.headers.get("content-type", "").startswith("application/json"), self
        data = json.loads(self.body)
        error = data["error"]
        # Anthropic's shape, on its paths, says what the API is at fault with, and names no field.
        named = {"request_id"} if data.get("type") == "error" else {"param"}
        assert {"message", "type", "code", *named} <= {*error, *data}, data
        assert isinstance(error["message"], str) and isinstance(error["code"], str), error
        return dict(error)

    def refused(self) -> bool:
        """4xx in our shape, or a connection that was closed."""
        if self.status == 0:
            return True
        assert 400 <= self.status < 500, (self.status, self.body[:300])
        return bool(self.error)


class Wire:
    """A connection of bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.sent = 0

    async def send(self, data: bytes) -> bool:
        """Whether the other side still took it."""
        try:
            self.writer.write(data)
            async with asyncio.timeout(LIMIT):
                await self.writer.drain()
        except ConnectionError:
            return False
        self.sent += len(data)
        return not self.writer.is_closing()

    async def pour(self, parts: Iterable[bytes]) -> None:
        """Send until the other side has enough: it answers, or closes."""
        for part in parts:
            if self.reader._buffer or self.reader.at_eof():  # type: ignore[attr-defined]
                return
            if not await self.send(part):
                return
            # What the other side takes at once never makes us wait, and its answer is to be read.
            await asyncio.sleep(0)

    async def ask(self, data: bytes) -> Reply:
        """Send a request; its answer."""
        await self.send(data)
        return await self.reply()

    async def reply(self) -> Reply:
        """The next answer."""
        async with asyncio.timeout(LIMIT):
            try:
                head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                lines = head.split("\r\n")
                pairs = (line.partition(":") for line in lines[1:] if line)
                headers = {name.lower(): value.strip() for name, _, value in pairs}
                body = await self._body(headers)
            except (asyncio.IncompleteReadError, ConnectionError):
                return Reply(0, {}, b"")
        return Reply(int(lines[0].split()[1]), headers, body)

    async def _body(self, headers: dict[str, str]) -> bytes:
        if "chunked" not in headers.get("transfer-encoding", ""):
            return await self.reader.readexactly(int(headers.get("content-length", 0)))
        body = b""
        while size := int(await self.reader.readline(), 16):
            body += await self.reader.readexactly(size)
            await self.reader.readexactly(2)
        await self.reader.readexactly(2)
        return body

    async def rest(self) -> bytes:
        """Everything until the other side closes."""
        async with asyncio.timeout(LIMIT):
            try:
                return await self.reader.read(-1)
            except ConnectionError:
                return b""


@contextlib.asynccontextmanager
async def connected(part: Part) -> AsyncIterator[Wire]:
    reader, writer = await asyncio.open_connection(*part.address, limit=2**20)
    try:
        yield Wire(reader, writer)
    finally:
        writer.transport.abort()


async def exchange(part: Part, data: bytes) -> Reply:
    """One request in bytes, and what it is answered."""
    async with connected(part) as wire:
        return await wire.ask(data)


def request(
    method: str,
    target: str | bytes,
    body: bytes = b"",
    *,
    key: str | bytes | None = ADMIN_KEY,
    headers: Iterable[tuple[bytes, bytes]] = (),
) -> bytes:
    """A request as bytes, exactly as said."""
    raw = target if isinstance(target, bytes) else target.encode("utf-8", "surrogatepass")
    lines = [method.encode() + b" " + raw + b" HTTP/1.1", b"Host: localhost"]
    if key is not None:
        text = key if isinstance(key, bytes) else key.encode("utf-8", "surrogatepass")
        lines.append(b"Authorization: Bearer " + text)
    if body or method in ("POST", "PUT"):
        lines.append(b"Content-Length: %d" % len(body))
        lines.append(b"Content-Type: application/json")
    lines += [name + b": " + value for name, value in headers]
    return b"\r\n".join([*lines, b"", body])
