"""The router: answers or passes on every request, from its start until it has drained."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from itertools import chain
from typing import Any, cast
from urllib.parse import unquote

from aiohttp import hdrs, web
from multidict import istr

from any_agent.auth.access import (
    NOBODY,
    Access,
    Caller,
    Scope,
    require_loopback_client,
)
from any_agent.auth.audit_log import AuditLog
from any_agent.completions.apis import encode_error, plain_path, require_no_websocket
from any_agent.config import Config, TrainConfig
from any_agent.config.litellm import may_have_keys, read_litellm_config
from any_agent.errors import (
    AnyAgentError,
    Draining,
    EngineUnavailable,
    InvalidRequest,
    PayloadTooLarge,
    ReplyLost,
    ServiceUnavailable,
    Unauthenticated,
)
from any_agent.keys import KEY_PREFIXES
from any_agent.rundir.fleet import FleetFile
from any_agent.rundir.layout import RunDir
from any_agent.rundir.registry import Heartbeat, Registry, RegistryEntry
from any_agent.rundir.store_beside import store_beside
from any_agent.runtime.bounded_server import BoundedConnection, BoundedServer, require_room
from any_agent.runtime.metrics import watch_loop_lag
from any_agent.runtime.request_limits import MAX_REQUESTS, RequestLimits, Reservation
from router.affinity import SessionAffinity
from router.areal import ArealRoutes
from router.body import BodyFields, RequestBody
from router.client_response import SERVER, ClientResponder
from router.dashboard.app import ROOT as UI_ROOT
from router.dashboard.app import Dashboard
from router.fanout import FanOut, Handler
from router.forward import Forwarder, is_idempotent
from router.front_page import FrontPage
from router.implicit_affinity import ImplicitAffinity
from router.lease import LeaseRoute
from router.metrics import CLIENT_LEFT, FAILED, MetricsRoute, RouterStats
from router.open_session import MAX_BYTES, START, OpenRoute
from router.rank_health import RankHealth
from router.upstream import Upstream, open_upstream

log = logging.getLogger(__name__)

_FETCH_SITE = istr("Sec-Fetch-Site")
_MAX_HEADER_BYTES = 32_768
_MAX_HEADERS = 128
_LIMITS = f"{_MAX_HEADERS} headers of {_MAX_HEADER_BYTES // 1024} KB together"
_MAX_LONG_BODIES = 8  # of the largest size in memory at once
_ANSWERED_WHILE_DRAINING = ("/healthz", "/metrics")
OVERVIEW = "/rl/v1/overview"
_KEYLESS = ("/", "/healthz", "/readyz", "/health", "/metrics", OVERVIEW)
"""Paths that the router answers without a key; metrics and overview check keys themselves."""
STOP_SECONDS = 1.5
"""Time for which aiohttp waits for requests under way, and again after it has cancelled them."""


class Router:
    """Handles every request."""

    def __init__(
        self,
        config: Config,
        access: Access,
        audit: AuditLog | None,
        upstream: Upstream,
        ranks: RankHealth,
    ) -> None:
        """Without ``audit`` there is no run folder, and `/metrics` is any rank's."""
        server = config.server
        self._access = access
        self._server = server
        self.limits = limits = RequestLimits(MAX_REQUESTS)
        limits.max_bytes = max(limits.max_bytes, _MAX_LONG_BODIES * server.max_body_bytes)
        self._affinity = affinity = SessionAffinity(access.signer, lambda: ranks.fleet)
        self.stats = RouterStats()
        self.ranks = ranks
        self.replies = ClientResponder(timeout=server.client_timeout)
        self.forwarder = forwarder = Forwarder(upstream, ranks, self.replies, access.signer)
        self._conversations = ImplicitAffinity(config, forwarder)
        own = config.litellm.config
        self._litellm = own is not None
        self._litellm_keys = own is not None and may_have_keys(read_litellm_config(own), os.environ)
        opens = OpenRoute(affinity, forwarder)
        self._own: dict[tuple[str, str], Handler] = {
            ("GET", START): opens.open,
            ("POST", START): opens.open,
            **FanOut(forwarder).routes,
            **LeaseRoute(affinity, forwarder).routes,
            **ArealRoutes(affinity, forwarder, access).routes,
            ("POST", "/export_trajectories"): self._pass_on_by_body,
            **{(m, "/healthz"): self._healthz for m in ("GET", "HEAD")},
            **{(m, "/readyz"): self._readyz for m in ("GET", "HEAD")},
        }
        """Handlers of routes that are not just passed on; a wrong or a session's key skips them."""
        self._audit = audit
        if audit is not None:
            self._metrics = MetricsRoute(self.stats, forwarder, upstream, access, audit)
            self._own["GET", "/metrics"] = self._metrics.show
        self._dashboard: Dashboard | None = None
        self.draining = False
        """Requests under way go on, and new ones are refused."""
        self._none_running = asyncio.Event()

    def show_run(
        self, run_dir: RunDir, public_url: str, train: TrainConfig, *, pages: bool
    ) -> None:
        """Answer `/`, the route of the overview, and with ``pages`` what is below `/ui` here."""
        assert self._audit is not None
        dashboard = Dashboard(
            run_dir,
            public_url,
            self._access,
            self._audit,
            self.forwarder,
            self._affinity,
            self._metrics,
            self.stats,
            train,
        )
        self._own["GET", OVERVIEW] = dashboard.show_overview
        front = FrontPage(public_url, self.replies, pages=pages)
        self._own |= {("GET", "/"): front.show, ("HEAD", "/"): front.show}
        self._dashboard = dashboard if pages else None

    async def drain(self, within: float) -> None:
        """Refuse new requests, and wait up to ``within`` seconds for those under way."""
        self.draining = True
        self.ranks.stop_waiting()
        if self.stats.running:
            with suppress(TimeoutError):
                async with asyncio.timeout(within):
                    await self._none_running.wait()
        if self.stats.running:
            log.warning("%d requests were not answered in time and are cut off", self.stats.running)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.stats.running += 1
        status = CLIENT_LEFT
        reservation: Reservation | None = None
        try:
            try:
                reservation = self.limits.acquire()
                response = await self._handle(request, reservation)
            except AnyAgentError as error:
                if isinstance(error, ReplyLost):
                    error.repeatable = is_idempotent(request)
                response = await self.replies.error(request, error)
            status = response.status
            return response
        except ConnectionError:
            raise
        except Exception:
            status = FAILED
            raise
        finally:
            if reservation is not None:
                reservation.release()
            self.stats.end(request, status)
            if self.draining and not self.stats.running:
                self._none_running.set()

    async def _handle(
        self, request: web.BaseRequest, reservation: Reservation
    ) -> web.StreamResponse:
        require_room(request)
        self._check(request)
        if self.draining and not request.path.startswith(_ANSWERED_WHILE_DRAINING):
            raise Draining(
                "the service is stopping: it finishes the requests under way and takes no new "
                "ones; try again",
                retry_after=5,
            )
        body = RequestBody(request, self._server, reservation)
        path, _, query = request.raw_path.partition("?")
        if "%" in path:
            path = unquote(path)
        if self._dashboard is not None and (path == UI_ROOT or path.startswith(f"{UI_ROOT}/")):
            return await self._dashboard.handle(request, path, body)
        rank, named, key = self._affinity.locate(path, query, request.headers)
        own = self._own.get((request.method, path))
        if own is None and not named and request.method == "POST" and path.startswith("/rl/"):
            own = self._pass_on_by_body
        caller = self._caller(key)
        scope = caller.scope
        if path == "/health" and self._litellm and scope is Scope.ADMIN:
            # LiteLLM's, of its models; everybody else gets AReaL's sign of life.
            own = None
        if scope in (Scope.NONE, Scope.SESSION, Scope.JUDGE, Scope.TENANT):
            reservation.charge_to(caller.identity)
        if scope is Scope.NONE:
            # A rank refuses it by its head, so the router does not wait for its body.
            body.short = False
        if own is None:
            path, _ = plain_path(path, litellm=self._litellm)
            require_no_websocket(request.method, path, request.headers.get(hdrs.UPGRADE))
            if not named and self._conversations.applies(request.method, path, scope):
                return await self._conversations.pass_on(request, path, body)
            return await self.forwarder.pass_on(request, rank, body)
        if path not in _KEYLESS and scope in (Scope.NONE, Scope.SESSION, Scope.JUDGE):
            # Any rank refuses it.
            return await self.forwarder.pass_on(request, None, body)
        return await own(request, body)

    def _caller(self, key: str) -> Caller:
        """Return the holder of a request's key, nobody for a wrong one, which ranks refuse.

        A key that may be LiteLLM's is a tenant's: the rank asks LiteLLM.
        """
        try:
            return self._access.caller(key)
        except Unauthenticated:
            if not self._litellm_keys or key.startswith(KEY_PREFIXES):
                return NOBODY
            # Wrong ones among them must not have a share of the limits each.
            return Caller(Scope.TENANT, "LiteLLM's keys", identity="LiteLLM's keys")

    async def _pass_on_by_body(
        self, request: web.BaseRequest, body: RequestBody
    ) -> web.StreamResponse:
        """Pass a request on to the rank of the `session_id`, else the answer, in its body."""
        fields = BodyFields(request, await body.read(MAX_BYTES))
        name = fields.text("session_id")
        if name is not None:
            rank = self._affinity.rank_of(name)
        else:
            rank = self._conversations.rank_of_answer(fields.text("completion_id"))
        return await self.forwarder.pass_on(request, rank, body, content=fields.content)

    def _check(self, request: web.BaseRequest) -> None:
        if sum(map(len, chain.from_iterable(request.raw_headers))) > _MAX_HEADER_BYTES:
            raise PayloadTooLarge(f"the request's headers exceed {_LIMITS}; send shorter ones")
        path = request.raw_path
        # An absolute URL would name another host, and a fragment (#) would not be sent on.
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
        """Answer that the process lives, and with the ranks' states."""
        ranks: dict[str, dict[str, Any]] = {}
        for rank in self.ranks.fleet.ranks:
            ranks[str(rank)] = {"state": "ready" if self.ranks.url(rank) else "away"}
            ranks[str(rank)] |= {"fleet": self.ranks.fleet.state(rank)}
            if entry := self.ranks.entry(rank):
                ranks[str(rank)] |= {"version": entry.version, "load": entry.load.model_dump()}
                ranks[str(rank)] |= {"engine_up": entry.engine_up}
        return await self.replies.json(request, {"status": "ok", "ranks": ranks})

    async def _readyz(self, request: web.BaseRequest, _: RequestBody) -> web.StreamResponse:
        """Answer with the ranks that answer, with an engine, and take writes; 503 without any."""
        serving = self.ranks.fleet.serving
        live = [r for r in self.ranks.live if r in serving and not self.ranks.stalled(r)]
        if not live:
            raise ServiceUnavailable("no rank of the service is up; try again", retry_after=2)
        live = [rank for rank in live if self.ranks.engine_up(rank)]
        if not live:
            raise EngineUnavailable(
                "no engine answers: calls wait for one, then get 503; try again", retry_after=2
            )
        ready = [rank for rank in live if not self.is_full(rank)]
        if not ready:
            raise ServiceUnavailable(
                "the disk of the ranks' journals is full: calls get 507 until there is "
                "space; free some",
                code="store_full",
                retry_after=10,
            )
        return await self.replies.json(request, {"status": "ready", "ranks": ready})

    def is_full(self, rank: int) -> bool:
        entry = self.ranks.entry(rank)
        return entry is not None and entry.store_full


class _Connection(BoundedConnection):
    head_limits = _LIMITS

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Writing pauses as soon as the client takes no more, so that nothing piles up here.
        cast(asyncio.WriteTransport, transport).set_write_buffer_limits(high=0)
        super().connection_made(transport)

    def encode(self, error: AnyAgentError, request: web.BaseRequest, status: int) -> web.Response:
        body, headers = encode_error(error, request.path, status)
        headers = {**headers, hdrs.SERVER: SERVER}
        return web.json_response(body, status=status, headers=headers)


class _Server(BoundedServer):
    connection_type = _Connection


@asynccontextmanager
async def listening(router: Router, listener: socket.socket) -> AsyncIterator[None]:
    """Serve the router on a bound socket until the context ends."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(watch_loop_lag(router.stats.loop_lag))
        low_level = _Server(
            router.handle,
            max_line_size=65_536,
            # Each field is bounded before `_check` adds them up.
            max_field_size=_MAX_HEADER_BYTES,
            max_headers=_MAX_HEADERS,
            auto_decompress=False,
        )
        runner = web.ServerRunner(low_level, shutdown_timeout=STOP_SECONDS)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.SockSite(runner, listener, backlog=2048).start()
        yield


@asynccontextmanager
async def running_router(
    config: Config, listener: socket.socket, public_url: str
) -> AsyncIterator[Router]:
    """Serve a run's router on a bound socket until the context ends."""
    run_dir = RunDir.of(config.root, config.user, config.experiment, config.trial)
    run_dir.create()
    server = config.server
    fleet = FleetFile(run_dir.fleet, server.ranks)
    also = store_beside(config)
    ranks = RankHealth(Registry(run_dir.registry, also), fleet, wait=server.rank_wait)
    access = Access(config)
    async with AsyncExitStack() as stack:
        upstream = await stack.enter_async_context(open_upstream())
        await stack.enter_async_context(ranks.watched())
        audit = AuditLog(run_dir.audit / "router.jsonl")
        stack.push_async_callback(asyncio.to_thread, audit.close)
        router = Router(config, access, audit, upstream, ranks)
        router.show_run(run_dir, public_url, config.train, pages=server.ui)
        await stack.enter_async_context(listening(router, listener))
        entry = RegistryEntry(
            name="router", boot_id=secrets.token_hex(8), url=public_url, pid=os.getpid()
        )
        stopping = entry.model_copy(update={"state": "stopping"})

        def current_entry() -> RegistryEntry:
            access.refresh()
            return stopping if router.draining else entry

        heartbeat = Heartbeat(run_dir.registry, current_entry, also)
        await heartbeat.begin()
        stack.push_async_callback(heartbeat.end)
        yield router


def serve(running: Callable[[], AbstractAsyncContextManager[Router]], drain_timeout: float) -> None:
    """Run the router until SIGINT, or until SIGTERM and a drain of up to ``drain_timeout`` seconds.

    A second signal ends it at once. Signals are handled only in the main thread.
    """
    import uvloop

    async def main() -> None:
        drain, stop = asyncio.Event(), asyncio.Event()

        def on_terminate() -> None:
            (stop if drain.is_set() else drain).set()

        def on_interrupt() -> None:
            drain.set()
            stop.set()

        if threading.current_thread() is threading.main_thread():
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGTERM, on_terminate)
            loop.add_signal_handler(signal.SIGINT, on_interrupt)
        async with running() as router:
            # The present objects stay, so the garbage collector need not scan them again and again.
            gc.collect()
            gc.freeze()
            # Requests leave few cycles behind.
            gc.set_threshold(10_000, 20, 20)
            await drain.wait()
            stopped = asyncio.create_task(stop.wait())
            drained = asyncio.create_task(router.drain(drain_timeout))
            await asyncio.wait({stopped, drained}, return_when=asyncio.FIRST_COMPLETED)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
