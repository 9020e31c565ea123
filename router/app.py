"""What is answered here, what is passed on, and to which rank; from start to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, cast

import orjson
from aiohttp import web

from any_agent.config import Config
from any_agent.errors import AnyAgentError, InvalidRequest, PayloadTooLarge
from any_agent.keys import KeySigner
from any_agent.loopback import require_local
from any_agent.registry import HEARTBEAT, Entry, Registry, publish
from any_agent.rundir import RunDir
from router.affinity import Affinity
from router.forward import Body, Forwarder
from router.health import Ranks
from router.upstream import open_upstream

log = logging.getLogger(__name__)

_MAX_HEADER_BYTES = 32_768
_KEEPALIVE = 75.0
_STOP_SECONDS = 3.0


class Router:
    """The handler of every request."""

    def __init__(
        self, config: Config, affinity: Affinity, ranks: Ranks, forwarder: Forwarder
    ) -> None:
        self._affinity = affinity
        self._ranks = ranks
        self._forwarder = forwarder
        self._open_mode = config.server.admin_key is None
        self._max_body = config.server.max_body_bytes
        self._client_timeout = config.server.client_timeout

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await self._handle(request)
        except AnyAgentError as error:
            if request.writer.output_size:
                raise
            return await self._error(request, error)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self._check(request)
        path, _, query = request.raw_path.partition("?")
        body = Body(request, limit=self._max_body, timeout=self._client_timeout)
        place = self._affinity.place(path, query, request.headers)
        if place.rank is None and not place.prefixed and request.method == "GET":
            if path == "/healthz":
                return await self._json(request, {"status": "ok", "ranks": self._states()})
            if path == "/readyz":
                ready = bool(self._ranks.live)
                return await self._json(request, {"ready": ready}, status=200 if ready else 503)
        return await self._forwarder.pass_on(request, place.rank, body)

    def _check(self, request: web.BaseRequest) -> None:
        if sum(len(k) + len(v) for k, v in request.raw_headers) > _MAX_HEADER_BYTES:
            raise PayloadTooLarge("the request's headers are too large")
        if not request.raw_path.startswith("/") or not request.raw_path.isascii():
            raise InvalidRequest("the request's path must begin with / and be percent-encoded")
        if self._open_mode:
            headers = request.headers
            require_local(
                hosts=headers.getall("Host", ()),
                origins=headers.getall("Origin", ()),
                fetch_sites=headers.getall("Sec-Fetch-Site", ()),
            )

    def _states(self) -> dict[str, Any]:
        out = {}
        for rank in range(self._ranks.count):
            entry = self._ranks.entry(rank)
            out[str(rank)] = {
                "state": "ready" if self._ranks.url(rank) else "away",
                "version": entry.version if entry else None,
                "load": entry.load.model_dump() if entry else None,
            }
        return out

    async def _json(
        self, request: web.BaseRequest, data: Any, *, status: int = 200, **headers: str
    ) -> web.StreamResponse:
        body = orjson.dumps(data)
        response = web.Response(
            status=status,
            headers={
                "Content-Type": "application/json",
                "Content-Length": str(len(body)),
                **headers,
            },
        )
        return await self._forwarder.answer(request, response, body)

    async def _error(self, request: web.BaseRequest, error: AnyAgentError) -> web.StreamResponse:
        return await self._json(request, error.body(), status=error.status, **error.headers())


class _Connection(web.RequestHandler):
    """One client's connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # Writing pauses as soon as the client takes no more, so that this is felt, and nothing
        # piles up here.
        cast(asyncio.WriteTransport, transport).set_write_buffer_limits(high=0)


class _Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


@asynccontextmanager
async def running_router(
    config: Config, listener: socket.socket, public_url: str
) -> AsyncIterator[Router]:
    """Serve on a bound socket until the context ends."""
    run_dir = RunDir.of(config.root, config.user, config.experiment, config.trial)
    run_dir.create()
    server = config.server
    ranks = Ranks(Registry(run_dir.registry), server.ranks, wait=server.rank_wait)
    affinity = Affinity(KeySigner(run_dir.signing_secret()), server.ranks)
    async with AsyncExitStack() as stack:
        upstream = await stack.enter_async_context(open_upstream())
        await stack.enter_async_context(ranks.watched())
        forwarder = Forwarder(upstream, ranks, client_timeout=server.client_timeout)
        router = Router(config, affinity, ranks, forwarder)
        low_level = _Server(
            router.handle,
            # A client that leaves ends what was begun for it.
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=_KEEPALIVE,
            max_line_size=65_536,
            max_field_size=65_536,
            auto_decompress=False,
        )
        runner = web.ServerRunner(low_level, shutdown_timeout=_STOP_SECONDS)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.SockSite(runner, listener, backlog=2048).start()
        await stack.enter_async_context(_published(run_dir, public_url))
        yield router


@asynccontextmanager
async def _published(run_dir: RunDir, url: str) -> AsyncIterator[None]:
    """Keep the router's own registry entry."""
    entry = Entry(name="router", boot_id=secrets.token_hex(8), url=url, pid=os.getpid())

    async def beat() -> None:
        while True:
            try:
                publish(run_dir.registry, entry)
            except OSError as error:
                log.warning("cannot write the registry entry: %s", error.strerror)
            await asyncio.sleep(HEARTBEAT)

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        publish(run_dir.registry, entry.model_copy(update={"state": "stopping"}))
