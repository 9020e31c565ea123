"""What is answered here, what is passed on, and to which rank; from start to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import chain
from typing import Any, cast
from urllib.parse import unquote

from aiohttp import hdrs, web
from multidict import CIMultiDictProxy, istr

from any_agent.auth.access import Access, Scope, require_loopback_client
from any_agent.auth.audit_log import AuditLog
from any_agent.completions.apis import encode_error
from any_agent.config import Config
from any_agent.errors import (
    AnyAgentError,
    Draining,
    InvalidRequest,
    PayloadTooLarge,
    ReplyLost,
    ServiceUnavailable,
    Unauthenticated,
)
from any_agent.keys import session_prefix
from any_agent.rundir.heartbeat import Heartbeat
from any_agent.rundir.layout import RunDir
from any_agent.rundir.registry import Registry, RegistryEntry
from any_agent.runtime.metrics import loop_lag_histogram, watch_loop_lag
from router.affinity import SessionAffinity, key_in
from router.areal import ArealRoutes
from router.body import BodyFields, RequestBody
from router.client_response import SERVER, ClientResponder
from router.fanout import FanOut, Handler
from router.forward import Forwarder
from router.implicit_affinity import ImplicitAffinity
from router.lease import LeaseRoute
from router.metrics import MetricsRoute
from router.open_session import MAX_BYTES, START, OpenRoute
from router.rank_health import RankHealth
from router.repeats import is_idempotent
from router.stats import CLIENT_LEFT, FAILED, RouterStats
from router.upstream import Upstream, open_upstream

log = logging.getLogger(__name__)

_FETCH_SITE = istr("Sec-Fetch-Site")
_MAX_HEADER_BYTES = 32_768
_MAX_HEADERS = 128
MAX_REQUESTS = 8192
"""Requests under way at once. The ranks bound what they take; this holds while they are away."""
_LIMITS = f"{_MAX_HEADERS} headers of {_MAX_HEADER_BYTES // 1024} KB together"
_KEEPALIVE = 75.0
"""Seconds until a connection is closed that sends no request, or does not finish its headers."""
_LOOKED_AT = ("/healthz", "/metrics")
"""Also answered by a service that is stopping."""
_FOR_EVERYBODY = ("/healthz", "/readyz", "/health", "/metrics")
"""Answered here without a key; of metrics their route says who may have them."""
_STOP_SECONDS = 1.5
"""aiohttp waits for requests under way once, cancels them, and waits once more."""


class Router:
    """The handler of every request."""

    def __init__(
        self,
        config: Config,
        access: Access,
        audit: AuditLog | None,
        upstream: Upstream,
        ranks: RankHealth,
    ) -> None:
        """Without ``audit`` there is no run: its metrics are any rank's."""
        server = config.server
        self._access = access
        self._max_body = server.max_body_bytes
        self._client_timeout = server.client_timeout
        self._affinity = affinity = SessionAffinity(access.signer, server.ranks)
        self.stats = RouterStats()
        self.loop_lag = loop_lag_histogram()
        self.ranks = ranks
        self.replies = replies = ClientResponder(timeout=server.client_timeout)
        self.forwarder = forwarder = Forwarder(upstream, ranks, replies)
        self._conversations = ImplicitAffinity(config, forwarder)
        opens = OpenRoute(affinity, ranks, forwarder, replies)
        self._own: dict[tuple[str, str], Handler] = {
            ("GET", START): opens.open,
            ("POST", START): opens.open,
            **FanOut(ranks, forwarder, replies).routes,
            **LeaseRoute(affinity, ranks, forwarder, replies).routes,
            **ArealRoutes(affinity, ranks, forwarder, replies, access).routes,
            **{(m, "/healthz"): self._healthz for m in ("GET", "HEAD")},
            **{(m, "/readyz"): self._readyz for m in ("GET", "HEAD")},
        }
        """What is not simply passed on, but for a key that is a session's, or no good at all."""
        if audit is not None:
            self._own["GET", "/metrics"] = MetricsRoute(self, upstream, access, audit).show
        self.draining = False
        """What is under way ends, and nothing begins."""
        self._none_running = asyncio.Event()

    async def drain(self, within: float) -> None:
        """Begin nothing new, and wait for what is under way, up to ``within`` seconds."""
        self.draining = True
        self.ranks.give_up()
        if self.stats.running:
            with suppress(TimeoutError):
                async with asyncio.timeout(within):
                    await self._none_running.wait()
        if self.stats.running:
            log.warning("%d requests were not answered in time and are cut off", self.stats.running)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.stats.running += 1
        status = CLIENT_LEFT
        try:
            response = await self._answer(request)
            status = response.status
            return response
        except ConnectionError:
            raise
        except Exception:
            status = FAILED
            raise
        finally:
            self.stats.end(request, status)
            if self.draining and not self.stats.running:
                self._none_running.set()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await self._handle(request)
        except ReplyLost as error:
            error.repeatable = is_idempotent(request)
            return await self.replies.error(request, error)
        except AnyAgentError as error:
            return await self.replies.error(request, error)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if self.stats.running > MAX_REQUESTS:
            raise ServiceUnavailable(
                f"{MAX_REQUESTS} requests are under way; try again",
                code="too_many_requests",
                retry_after=2,
            )
        self._check(request)
        if self.draining and not request.path.startswith(_LOOKED_AT):
            raise Draining(
                "the service is stopping: it ends what is under way and begins nothing new; try "
                "again",
                retry_after=5,
            )
        body = RequestBody(request, limit=self._max_body, timeout=self._client_timeout)
        path, _, query = request.raw_path.partition("?")
        if "%" in path:
            path = unquote(path)
        rank, named = self._affinity.place(path, query, request.headers)
        own = self._own.get((request.method, path))
        if own is None and not named and request.method == "POST" and path.startswith("/rl/"):
            own = self._by_body
        scope = self._scope(path, request.headers)
        if scope is Scope.NONE:
            # A rank refuses it by its head, so nobody waits here for its body.
            body.short = False
        if own is None:
            if not named and self._conversations.takes(request.method, path, scope):
                return await self._conversations.place(request, path, body)
            return await self.forwarder.pass_on(request, rank, body)
        if path not in _FOR_EVERYBODY and scope in (Scope.NONE, Scope.SESSION):
            # Any rank refuses it.
            return await self.forwarder.pass_on(request, None, body)
        return await own(request, body)

    def _scope(self, path: str, headers: CIMultiDictProxy[str]) -> Scope:
        """What the request's key is good for. The ranks judge it; here nothing is kept for none."""
        key = session_prefix(path)
        try:
            return self._access.caller(key_in(headers) if key is None else key).scope
        except Unauthenticated:
            return Scope.NONE

    async def _by_body(self, request: web.BaseRequest, body: RequestBody) -> web.StreamResponse:
        """To the rank of the `session_id` in the body."""
        said = BodyFields(request, await body.whole(MAX_BYTES))
        name = said.text("session_id")
        rank = self._affinity.rank_of(name) if name is not None else None
        return await self.forwarder.pass_on(request, rank, body, content=said.content)

    def _check(self, request: web.BaseRequest) -> None:
        if sum(map(len, chain.from_iterable(request.raw_headers))) > _MAX_HEADER_BYTES:
            raise PayloadTooLarge(f"the request's headers exceed {_LIMITS}")
        path = request.raw_path
        # An absolute one would name another host; what follows a # would not be sent on.
        if not path.startswith("/") or not path.isascii() or "#" in path:
            raise InvalidRequest("the request's path must begin with / and be percent-encoded")
        if self._access.open_mode:
            headers = request.headers
            require_loopback_client(
                hosts=headers.getall(hdrs.HOST, ()),
                origins=headers.getall(hdrs.ORIGIN, ()),
                fetch_sites=headers.getall(_FETCH_SITE, ()),
            )

    async def _healthz(self, request: web.BaseRequest, _: RequestBody) -> web.StreamResponse:
        """The process lives; which ranks it sees."""
        ranks = {str(rank): self._state(rank) for rank in range(self.ranks.count)}
        return await self.replies.json(request, {"status": "ok", "ranks": ranks})

    def _state(self, rank: int) -> dict[str, Any]:
        entry = self.ranks.entry(rank)
        state = "ready" if self.ranks.url(rank) else "away"
        if entry is None:
            return {"state": state}
        return {"state": state, "version": entry.version, "load": entry.load.model_dump()}

    async def _readyz(self, request: web.BaseRequest, _: RequestBody) -> web.StreamResponse:
        """Some rank can be reached and takes writes; 503 otherwise."""
        live = self.ranks.live
        if not live:
            raise ServiceUnavailable("no rank of the service is up", retry_after=2)
        ready = [rank for rank in live if not self._is_full(rank)]
        if not ready:
            raise ServiceUnavailable(
                "the disk of the ranks' journals is full: calls are answered with 507 until "
                "there is space",
                code="store_full",
                retry_after=10,
            )
        return await self.replies.json(request, {"status": "ready", "ranks": ready})

    def _is_full(self, rank: int) -> bool:
        entry = self.ranks.entry(rank)
        return entry is not None and entry.store_full


class _Connection(web.RequestHandler):
    """One client's connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # Writing pauses as soon as the client takes no more, so that this is felt, and nothing
        # piles up here.
        cast(asyncio.WriteTransport, transport).set_write_buffer_limits(high=0)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What is no HTTP (400), or a fault of ours. The bytes are not logged: they hold keys."""
        if status < 500:
            error: AnyAgentError = InvalidRequest(
                f"the request is not valid HTTP, or it exceeds {_LIMITS}"
            )
        elif isinstance(exc, ConnectionError):
            # The client left while its answer was being sent. OpenAI's SDK does so at the end of
            # every stream: it does not wait for the last, empty chunk.
            raise exc
        else:
            log.error("a request failed", exc_info=exc)
            error = AnyAgentError("the router failed; its log says why")
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun")
        body, headers = encode_error(error, request.path, status)
        response = web.json_response(body, status=status, headers=headers)
        response.headers[hdrs.SERVER] = SERVER
        response.force_close()
        return response


class _Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


@asynccontextmanager
async def listening(router: Router, listener: socket.socket) -> AsyncIterator[None]:
    """Answer what comes to a bound socket until the context ends."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(watch_loop_lag(router.loop_lag))
        low_level = _Server(
            router.handle,
            # A client that leaves ends what was begun for it.
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=_KEEPALIVE,
            max_line_size=65_536,
            # So that what comes before they are summed up is bounded, too.
            max_field_size=_MAX_HEADER_BYTES,
            max_headers=_MAX_HEADERS,
            auto_decompress=False,
        )
        runner = web.ServerRunner(low_level, shutdown_timeout=_STOP_SECONDS)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.SockSite(runner, listener, backlog=2048).start()
        yield


@asynccontextmanager
async def running_router(
    config: Config, listener: socket.socket, public_url: str
) -> AsyncIterator[Router]:
    """Serve on a bound socket until the context ends."""
    run_dir = RunDir.of(config.root, config.user, config.experiment, config.trial)
    run_dir.create()
    server = config.server
    ranks = RankHealth(Registry(run_dir.registry), server.ranks, wait=server.rank_wait)
    access = Access(config)
    async with AsyncExitStack() as stack:
        upstream = await stack.enter_async_context(open_upstream())
        await stack.enter_async_context(ranks.watched())
        audit = AuditLog(run_dir.audit / "router.jsonl")
        stack.push_async_callback(asyncio.to_thread, audit.close)
        router = Router(config, access, audit, upstream, ranks)
        await stack.enter_async_context(listening(router, listener))
        entry = RegistryEntry(
            name="router", boot_id=secrets.token_hex(8), url=public_url, pid=os.getpid()
        )
        last = entry.model_copy(update={"state": "stopping"})

        def now() -> RegistryEntry:
            access.refresh()
            return last if router.draining else entry

        presence = Heartbeat(run_dir.registry, now)
        await presence.begin()
        stack.push_async_callback(presence.end)
        yield router
