"""The router: answers or passes on every request, from its start until it has drained."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
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
from any_agent.completions.apis import plain_path, require_no_websocket
from any_agent.config import Config, TrainConfig
from any_agent.config.litellm import may_have_keys, read_litellm_config
from any_agent.errors import (
    EngineUnavailable,
    ServiceUnavailable,
    Unauthenticated,
)
from any_agent.keys import KEY_PREFIXES
from any_agent.rundir.fleet import FleetFile
from any_agent.rundir.layout import RunDir
from any_agent.rundir.registry import Heartbeat, Registry, RegistryEntry
from any_agent.rundir.store_beside import store_beside
from any_agent.runtime.request_limits import Reservation
from router.affinity import SessionAffinity
from router.areal import ArealRoutes
from router.body import BodyFields, RequestBody
from router.dashboard.app import ROOT as UI_ROOT
from router.dashboard.app import Dashboard
from router.entrance import Entrance, listening
from router.fanout import FanOut, Handler
from router.forward import Forwarder
from router.front_page import FrontPage
from router.implicit_affinity import ImplicitAffinity
from router.lease import LeaseRoute
from router.metrics import MetricsRoute
from router.open_session import MAX_BYTES, START, OpenRoute
from router.rank_health import RankHealth
from router.upstream import Upstream, open_upstream

log = logging.getLogger(__name__)

_FETCH_SITE = istr("Sec-Fetch-Site")
OVERVIEW = "/rl/v1/overview"
_KEYLESS = ("/", "/healthz", "/readyz", "/health", "/metrics", OVERVIEW)
"""Paths that the router answers without a key; metrics and overview check keys themselves."""


class Router(Entrance):
    """Handles every request of a run."""

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
        super().__init__(max_body_bytes=server.max_body_bytes, client_timeout=server.client_timeout)
        self._access = access
        self._server = server
        self._affinity = affinity = SessionAffinity(access.signer, lambda: ranks.fleet)
        self.ranks = ranks
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
        self.ranks.stop_waiting()
        await super().drain(within)

    def check(self, request: web.BaseRequest) -> None:
        super().check(request)
        if self._access.open_mode:
            headers = request.headers
            require_loopback_client(
                hosts=headers.getall(hdrs.HOST, ()),
                origins=headers.getall(hdrs.ORIGIN, ()),
                fetch_sites=headers.getall(_FETCH_SITE, ()),
            )

    async def answer(
        self, request: web.BaseRequest, reservation: Reservation
    ) -> web.StreamResponse:
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
