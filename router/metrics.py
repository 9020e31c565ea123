"""The router's counters, and `/metrics` of the whole run: of the router, ranks and trainer."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Set
from typing import TypeAlias, TypeVar

from aiohttp import web
from multidict import CIMultiDict

from any_agent.auth.access import METRICS_SCOPES, Access, Caller, Scope, authorize
from any_agent.auth.audit_log import AuditLog
from any_agent.completions.apis import all_apis
from any_agent.errors import AnyAgentError
from any_agent.keys import key_id
from any_agent.rundir.registry import rank_name
from any_agent.runtime.metrics import (
    CONTENT_TYPE,
    LOOP_LAG,
    Exposition,
    Metric,
    Reading,
    Value,
    Values,
    loop_lag_histogram,
    merged,
)
from router.affinity import key_in
from router.body import RequestBody
from router.forward import Forwarder
from router.upstream import NeverSent, Upstream

TIMEOUT = 2.0
_TRAINER = "trainer"

CLIENT_LEFT = 499
"""Counted status of requests whose client left before its answer was complete, as in nginx."""
FAILED = 500
OTHER = "other"
_ROUTES = {
    *("abort", "ack", "capacity", "count_tokens", "end_session", "export_trajectories", "feedback"),
    *("finalize", "grant_capacity", "healthz", "heartbeat", "lease", "metrics", "models", "next"),
    *("overview", "pause", "readyz", "resume", "run", "sessions", "set_reward", "start_session"),
    *("version", "veto", "account", "accounts", "budget", "keys", "runs", "start", "stop", "usage"),
}
"""Last words of our own paths. Words that clients make up must not become labels."""


def known_routes() -> set[str]:
    """Return the last words of the paths that are counted separately, the APIs' among them."""
    return _ROUTES | {api.path.rpartition("/")[2] for api in all_apis()}


class RouterStats:
    """Counts the router's requests and their bytes."""

    def __init__(self) -> None:
        self._routes = known_routes()
        self.running = 0
        self.ended: Counter[tuple[str, int]] = Counter()
        """Number of requests by route and status."""
        self.bytes_in = 0
        """Bytes of the requests' bodies."""
        self.bytes_out = 0
        """Bytes of the answers and their heads."""
        self.refused: Counter[str] = Counter()
        """Number of requests that the router refused by itself, by the error's code."""
        self.loop_lag = loop_lag_histogram()

    def end(self, request: web.BaseRequest, status: int) -> None:
        self.running -= 1
        last = request.raw_path.partition("?")[0].rpartition("/")[2]
        self.ended[last if last in self._routes else OTHER, status] += 1
        self.bytes_in += request.content.total_bytes
        self.bytes_out += request.writer.output_size


Of = TypeVar("Of")
_Row: TypeAlias = tuple[Metric, Callable[[Of], Value | Values]]


def _counter(
    name: str, meaning: str, read: Callable[[Of], Value | Values], *labels: str
) -> _Row[Of]:
    return Metric(f"any_agent_router_{name}_total", "counter", meaning, labels), read


def _gauge(name: str, meaning: str, read: Callable[[Of], Value | Values]) -> _Row[Of]:
    return Metric(f"any_agent_router_{name}", "gauge", meaning), read


_UP = Metric(
    "any_agent_up",
    "gauge",
    "1 if the part gave its metrics to this scrape. A trainer that is done is not missed.",
    ("part",),
)
_ENTRANCE: tuple[_Row[RouterStats], ...] = (
    _counter(
        "requests",
        "Requests by route (the path's last word, or other) and status; 499: the client left.",
        lambda stats: {(route, str(code)): n for (route, code), n in stats.ended.items()},
        *("route", "status"),
    ),
    _gauge("requests_running", "Requests under way.", lambda stats: stats.running),
    _counter(
        "refusals",
        "Requests that the router refused by itself, by the error's code; a rank's are not among "
        "them.",
        lambda stats: {(code,): number for code, number in stats.refused.items()},
        "code",
    ),
    _counter("received_bytes", "Bytes of requests' bodies received.", lambda stats: stats.bytes_in),
    _counter("sent_bytes", "Bytes of answers sent.", lambda stats: stats.bytes_out),
)
_FORWARDER: tuple[_Row[Forwarder], ...] = (
    _gauge(
        "requests_waiting",
        "Requests that wait for a rank that is away.",
        lambda forwarder: forwarder.ranks.waiting,
    ),
    _counter(
        "retries",
        "Requests sent again, since their rank had not got them.",
        lambda forwarder: forwarder.retried,
    ),
    _counter(
        "replies_lost",
        "Requests whose rank died before it answered.",
        lambda forwarder: forwarder.lost,
    ),
    _counter(
        "answers_aborted",
        "Answers whose rank died in the middle; their clients' connections were aborted.",
        lambda forwarder: forwarder.replies.broken,
    ),
    _counter(
        "clients_cut",
        "Clients cut off because they took nothing of their answers for too long.",
        lambda forwarder: forwarder.replies.cut,
    ),
)
METRICS = (_UP, LOOP_LAG, *(metric for metric, _ in (*_ENTRANCE, *_FORWARDER)))


def of_entrance(stats: RouterStats, part: str) -> Iterator[Reading]:
    """Yield the metrics of what a part does for its clients, whatever is behind it."""
    yield LOOP_LAG, {(part,): stats.loop_lag}
    yield from ((metric, read(stats)) for metric, read in _ENTRANCE)


def authorize_request(
    request: web.BaseRequest, scopes: Set[Scope], access: Access, audit: AuditLog
) -> Caller:
    """Return the holder of a request's key; check it as the ranks do, and log a refusal."""
    bearer = key_in(request.headers)
    try:
        caller = access.caller(bearer)
        authorize(scopes, caller)
    except AnyAgentError as error:
        route = f"{request.method} {request.path}"
        about = {"route": route, "status": error.status, "client": request.remote}
        audit.refusal(error.code, claimed=key_id(bearer), **about)
        raise
    return caller


class MetricsRoute:
    """Handles `/metrics`: it checks the caller's key, and scrapes the parts with the run's keys."""

    def __init__(
        self,
        stats: RouterStats,
        forwarder: Forwarder,
        upstream: Upstream,
        access: Access,
        audit: AuditLog,
    ) -> None:
        self._stats = stats
        self._forwarder = forwarder
        self._upstream = upstream
        self._access = access
        self._audit = audit

    async def show(self, request: web.BaseRequest, _: RequestBody) -> web.StreamResponse:
        """Answer with every part's metrics; a part that does not answer has only `any_agent_up`."""
        authorize_request(request, METRICS_SCOPES, self._access, self._audit)
        texts = await self.scrape()
        up: Values = {(name,): text is not None for name, text in texts.items()}
        passed_on = [(metric, read(self._forwarder)) for metric, read in _FORWARDER]
        readings = [(_UP, up), *of_entrance(self._stats, "router"), *passed_on]
        own = Exposition("router", lambda: readings).render().decode()
        body = merged([own, *(text for text in texts.values() if text)]).encode()
        head = CIMultiDict({"Content-Type": CONTENT_TYPE, "Content-Length": str(len(body))})
        return await self._forwarder.replies.send(request, 200, head, body)

    async def scrape(self) -> dict[str, str | None]:
        """Return the metrics of each part that should run; None for one that does not answer."""
        parts = self._parts()
        texts = await asyncio.gather(*(self._fetch(*part) for part in parts.items()))
        return dict(zip(parts, texts, strict=True))

    def _parts(self) -> dict[str, str]:
        """Return the URL of each part that should run, "" for one that is away."""
        ranks = self._forwarder.ranks
        parts = {rank_name(rank): ranks.url(rank) for rank in ranks.fleet.ranks}
        trainer = ranks.trainer
        if trainer is not None and trainer.state == "ready":
            parts[_TRAINER] = trainer.url
        return parts

    async def _fetch(self, part: str, url: str) -> str | None:
        """Return a part's metrics; None if it does not answer with any."""
        if not url:
            return None
        signer = self._access.signer
        key = signer.metrics_key if part == _TRAINER else signer.run_key
        headers = CIMultiDict({"Authorization": f"Bearer {key}"})
        try:
            async with (
                asyncio.timeout(TIMEOUT),
                await self._upstream.send("GET", url, "/metrics", headers, None) as response,
            ):
                body = await response.read()
        except (AnyAgentError, NeverSent, TimeoutError):
            return None
        shown = response.status == 200 and response.headers.get("Content-Type") == CONTENT_TYPE
        return body.decode(errors="replace") if shown else None
