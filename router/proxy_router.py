"""A router for proxies that are named by their URLs, without the folder of a run.

The ranks alone check keys: the router only reads the rank in a session's key.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Self

import httpx
from aiohttp import hdrs, web

from any_agent.auth.access import ADMIN, ANYONE, NOBODY, Access, Caller, Scope
from any_agent.config import LOOPBACK, Config, load_config
from any_agent.errors import (
    AnyAgentError,
    ConfigError,
    ServiceUnavailable,
    StartupError,
    UnsupportedEncoding,
)
from any_agent.keys import (
    JUDGE_KEY_PREFIX,
    LANE_KEY_PREFIXES,
    SESSION_KEY_PREFIX,
    KeySigner,
    Lane,
    lane_in,
)
from any_agent.rundir.fleet import FleetFile
from any_agent.rundir.registry import Registry, RegistryEntry, RegistrySnapshot, rank_name
from any_agent.runtime.command_line import one_line_errors
from any_agent.runtime.ports import reserve, url_of
from router.app import Router
from router.client_response import ClientResponder
from router.entrance import listening, serve
from router.rank_health import RankHealth
from router.upstream import open_upstream

log = logging.getLogger(__name__)

_HEALTH_TIMEOUT = 5.0
_POLL_INTERVAL = 0.25
"""Seconds between checks of a connection whose server does not report that the client left."""
_sender_key: ContextVar[str] = ContextVar("sender_key", default="")
"""The key of the request that is being answered, "" for none."""


class ProxyRouter:
    """One URL for several proxies, each another rank of one service.

    Sessions are opened at the ranks in turn; a request that names a session goes to its rank. The
    proxies must run already, share the run's signing secret (the same experiment and trial), and be
    all of its ranks. Raises ConfigError for invalid URLs.

    It has no key of its own. If an open must be at one rank (it has an Idempotency-Key or an
    earlier session's key), a granted slot is brought there with the sender's key, which may be an
    admin's; tenants and the run's own trainer need the run's own router for that.
    """

    def __init__(self, proxy_urls: Sequence[str]) -> None:
        # A proxy that is named twice is one rank all the same.
        urls = list(dict.fromkeys(str(url).rstrip("/") for url in proxy_urls))
        if isinstance(proxy_urls, str) or not urls:
            raise ConfigError("ProxyRouter needs a list of its proxies' URLs, one or more")
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ConfigError(f"{url!r} is not a proxy's URL: give one like http://node1:8001")
        self.proxy_urls = urls
        self._opening: asyncio.Task[Router] | None = None
        """Opens the router, or has opened it."""
        self._stack = AsyncExitStack()
        self._replies = ClientResponder(timeout=Config().server.client_timeout)

    def start(self, host: str = "0.0.0.0", port: int = 8080) -> None:
        """Serve until Ctrl-C, or until SIGTERM, which lets requests under way finish.

        ConfigError for an address that others reach while the proxies need no key, and for a port
        that is taken; StartupError if a proxy does not answer. A script that ends by one of these
        prints one line.
        """
        one_line_errors()
        listener = reserve(host, port)
        bound = url_of(host, listener.getsockname()[1])

        @asynccontextmanager
        async def running() -> AsyncIterator[Router]:
            async with self:
                router = await self.opened(host)
                async with listening(router, listener):
                    print(f"any-agent router listening at {bound}", flush=True)
                    yield router

        with listener:
            serve(running, Config().server.drain_timeout)

    async def route_request(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request of an aiohttp server as its rank does.

        The first request connects to the proxies (503 while they do not all answer); :meth:`close`
        disconnects. A request is cancelled when its client leaves. A body with a Content-Encoding
        is refused (415): the server may have decoded it already.
        """
        try:
            _require_plain(request)
            router = await self.opened(LOOPBACK[0])
        except (ConfigError, StartupError) as error:
            log.error("requests cannot be routed: %s", error)
            away = ServiceUnavailable(
                "the service's proxies cannot be reached; try again (the router's log has the "
                "reason)",
                retry_after=2,
            )
            return await self._replies.error(request, away)
        except AnyAgentError as error:
            return await self._replies.error(request, error)
        return await _while_connected(request, router.handle(request))

    async def close(self) -> None:
        """Close the connections to the proxies."""
        opening, self._opening = self._opening, None
        # A task that is done cannot be cancelled, and its event loop may be closed.
        if opening is not None and opening.cancel():
            await asyncio.wait([opening])
        await self._stack.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def opened(self, host: str) -> Router:
        """Return the router, opened by the first caller; concurrent callers share the outcome."""
        opening = self._opening
        if opening is None or (opening.done() and (opening.cancelled() or opening.exception())):
            opening = self._opening = asyncio.create_task(self._open(host))
        # Shielded: other callers may wait for it as well.
        return await asyncio.shield(opening)

    async def _open(self, host: str) -> Router:
        async with AsyncExitStack() as stack:
            proxies = _Proxies(self.proxy_urls)
            stack.callback(proxies.close)
            closed = await asyncio.to_thread(proxies.require_all)
            if host not in LOOPBACK and not closed:
                raise ConfigError(
                    f"{host} is reachable from outside, and the proxies need no key: start them "
                    "with an admin key (ANY_AGENT_SERVER__ADMIN_KEY), or bind host='127.0.0.1'"
                )
            config = load_config(None, [f"server.ranks={len(self.proxy_urls)}"], {})
            fleet = FleetFile(None, config.server.ranks)
            ranks = RankHealth(proxies, fleet, wait=config.server.rank_wait)
            upstream = await stack.enter_async_context(open_upstream())
            await stack.enter_async_context(ranks.watched())
            router = Router(config, _UncheckedAccess(closed), None, upstream, ranks)
            self._stack = stack.pop_all()
            return router


def _require_plain(request: web.BaseRequest) -> None:
    for encoding in request.headers.getall(hdrs.CONTENT_ENCODING, ()):
        if encoding.strip().lower() not in ("", "identity"):
            raise _UnsupportedEncoding(
                f"a body in the encoding {encoding[:40]!r} is not supported: send it without "
                "Content-Encoding"
            )


class _UnsupportedEncoding(UnsupportedEncoding):
    accepted = "identity"


async def _while_connected(
    request: web.BaseRequest, answer: Coroutine[Any, Any, web.StreamResponse]
) -> web.StreamResponse:
    """Await the answer; cancel it when the client's connection ends.

    aiohttp does that itself only in a server with `handler_cancellation`.
    """
    loop = asyncio.get_running_loop()
    answering = loop.create_task(answer)
    timer: asyncio.TimerHandle

    def poll() -> None:
        nonlocal timer
        transport = request.transport
        if transport is None or transport.is_closing():
            answering.cancel()
        else:
            timer = loop.call_later(_POLL_INTERVAL, poll)

    timer = loop.call_later(_POLL_INTERVAL, poll)
    try:
        return await answering
    finally:
        timer.cancel()


class _Proxies(Registry):
    """The proxies that answer, by the rank that each reports."""

    def __init__(self, urls: Sequence[str]) -> None:
        super().__init__(Path())
        self._urls = urls
        self._http = httpx.Client(timeout=_HEALTH_TIMEOUT, trust_env=False)
        self._threads = ThreadPoolExecutor(min(len(urls), 32), thread_name_prefix="proxies")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._http.close()

    def refresh(self) -> None:
        for url, health in zip(
            self._urls, self._threads.map(self._health, self._urls), strict=True
        ):
            if health is not None:
                name = rank_name(health["rank"])
                up = health.get("engine_up") is not False
                entry = RegistryEntry(name=name, boot_id=url, url=url, pid=0, engine_up=up)
                self._seen[name] = RegistrySnapshot((0, 0, b""), time.monotonic(), entry)

    def require_all(self) -> bool:
        """Return whether the proxies need keys.

        StartupError if one does not answer, ConfigError unless they are all ranks of one service.
        """
        found = list(self._threads.map(self._health, self._urls))
        if missing := [url for url, health in zip(self._urls, found, strict=True) if not health]:
            raise StartupError(
                f"no proxy of any-agent answers at {', '.join(missing)}: start it first, as "
                "`python -m proxy_ext --rank 0 ...`"
            )
        ranks = sorted(health["rank"] for health in found if health)
        if ranks != list(range(len(ranks))):
            raise ConfigError(
                f"the proxies are the ranks {', '.join(map(str, ranks))}: name each rank of the "
                f"service once, from 0 to {len(ranks) - 1}"
            )
        return all(self._threads.map(self._needs_key, self._urls))

    def _health(self, url: str) -> dict[str, Any] | None:
        try:
            health = self._http.get(f"{url}/healthz").json()
        except (httpx.HTTPError, ValueError):
            return None
        rank = health.get("rank") if isinstance(health, dict) else None
        return health if isinstance(rank, int) and rank >= 0 else None

    def _needs_key(self, url: str) -> bool:
        try:
            return self._http.get(f"{url}/rl/v1/capacity").status_code in (401, 403)
        except httpx.HTTPError as error:
            raise StartupError(
                f"{url} does not answer ({type(error).__name__}): is the proxy running?"
            ) from None


class _UncheckedAccess(Access):
    """Judges a key by its form alone; the rank that gets the request checks it."""

    def __init__(self, closed: bool) -> None:
        self.signer = _UncheckedSigner(b"")
        self._closed = closed

    @property
    def open_mode(self) -> bool:
        return not self._closed

    def refresh(self) -> None:
        pass

    def caller(self, bearer: str) -> Caller:
        _sender_key.set(bearer)
        if bearer.startswith(LANE_KEY_PREFIXES):
            lane = lane_in(bearer)
            scope = Scope.JUDGE if bearer.startswith(JUDGE_KEY_PREFIX) else Scope.SESSION
            return Caller(scope, scope.value, identity=f"lane {lane.id}" if lane else "")
        if bearer:
            return ADMIN
        return NOBODY if self._closed else ANYONE


class _UncheckedSigner(KeySigner):
    """Reads the lane of any key, genuine or not."""

    @property
    def run_key(self) -> str:
        """The sender's own key, as this router has no key of the run."""
        return _sender_key.get()

    def verify(self, key: str, prefix: str = SESSION_KEY_PREFIX) -> Lane | None:
        return lane_in(key)
