"""`/metrics` of the whole run: the router's own, each rank's and the trainer's, as one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol

from aiohttp import web
from multidict import CIMultiDict

from any_agent.auth.access import METRICS_SCOPES, Access, authorize
from any_agent.auth.audit_log import AuditLog
from any_agent.errors import AnyAgentError
from any_agent.keys import key_id
from any_agent.rundir.registry import rank_name
from any_agent.runtime.metrics import (
    CONTENT_TYPE,
    LOOP_LAG,
    Exposition,
    Histogram,
    Metric,
    Reading,
    Values,
)
from router.affinity import key_in
from router.body import RequestBody
from router.client_response import ClientResponder
from router.forward import Forwarder
from router.rank_health import RankHealth
from router.stats import RouterStats
from router.upstream import NeverSent, Upstream

_TIMEOUT = 2.0
_TRAINER = "trainer"

UP = Metric(
    "any_agent_up",
    "gauge",
    "1 if the part gave its metrics to this scrape. A trainer that is done is not missed.",
    ("part",),
)
REQUESTS = Metric(
    "any_agent_router_requests_total",
    "counter",
    "Requests by route (the path's last word, or other) and status; 499: the client left.",
    ("route", "status"),
)
RUNNING = Metric("any_agent_router_requests_running", "gauge", "Requests under way.")
WAITING = Metric(
    "any_agent_router_requests_waiting", "gauge", "Requests that wait for a rank that is away."
)
RETRIED = Metric(
    "any_agent_router_retries_total",
    "counter",
    "Requests sent again, since their rank had not got them.",
)
LOST = Metric(
    "any_agent_router_replies_lost_total",
    "counter",
    "Requests whose rank died before it answered.",
)
BROKEN = Metric(
    "any_agent_router_answers_aborted_total",
    "counter",
    "Answers whose rank died in the middle; their clients' connections were aborted.",
)
CUT = Metric(
    "any_agent_router_clients_cut_total",
    "counter",
    "Clients cut off because they took nothing of their answers for too long.",
)
BYTES_IN = Metric(
    "any_agent_router_received_bytes_total", "counter", "Bytes of requests' bodies received."
)
BYTES_OUT = Metric("any_agent_router_sent_bytes_total", "counter", "Bytes of answers sent.")

METRICS = tuple(value for value in globals().values() if isinstance(value, Metric))


class _Counted(Protocol):
    """What is measured of a router."""

    stats: RouterStats
    ranks: RankHealth
    replies: ClientResponder
    forwarder: Forwarder
    loop_lag: Histogram


class MetricsRoute:
    """The handler. Callers need a key of a scope that may read metrics; the parts get the run's."""

    def __init__(
        self, router: _Counted, upstream: Upstream, access: Access, audit: AuditLog
    ) -> None:
        self._router = router
        self._upstream = upstream
        self._access = access
        self._audit = audit

    async def show(self, request: web.BaseRequest, _: RequestBody) -> web.StreamResponse:
        """Every part's metrics; one that does not answer is shown by `any_agent_up` alone."""
        self._authorize(request)
        headers = CIMultiDict({"Authorization": f"Bearer {self._access.signer.run_key}"})
        parts = self._parts()
        texts = await asyncio.gather(*(self._fetch(url, headers) for url in parts.values()))
        up: Values = {(name,): text is not None for name, text in zip(parts, texts, strict=True)}
        own = Exposition("router", lambda: [(UP, up), *self._read()]).render().decode()
        body = merged([own, *(text for text in texts if text)]).encode()
        head = CIMultiDict({"Content-Type": CONTENT_TYPE, "Content-Length": str(len(body))})
        return await self._router.replies.whole(request, 200, head, body)

    def _authorize(self, request: web.BaseRequest) -> None:
        """As the ranks do: Unauthenticated without a key, Forbidden with one that does not do."""
        bearer = key_in(request.headers)
        try:
            authorize(METRICS_SCOPES, self._access.caller(bearer))
        except AnyAgentError as error:
            about = {"route": "GET /metrics", "status": error.status, "client": request.remote}
            self._audit.refusal(error.code, claimed=key_id(bearer), **about)
            raise

    def _parts(self) -> dict[str, str]:
        """The URL of each part that should be there, "" if it is away."""
        ranks = self._router.ranks
        parts = {rank_name(rank): ranks.url(rank) for rank in range(ranks.count)}
        trainer = ranks.trainer
        if trainer is not None and trainer.state == "ready":
            parts[_TRAINER] = trainer.url
        return parts

    async def _fetch(self, url: str, headers: CIMultiDict[str]) -> str | None:
        """A part's metrics, or None."""
        if not url:
            return None
        try:
            async with asyncio.timeout(_TIMEOUT):
                answer = await self._upstream.exchange(-1, "GET", url, "/metrics", headers, None)
        except (AnyAgentError, NeverSent, TimeoutError):
            return None
        shown = answer.status == 200 and answer.headers.get("Content-Type") == CONTENT_TYPE
        return answer.body.decode(errors="replace") if shown else None

    def _read(self) -> Iterable[Reading]:
        router = self._router
        stats = router.stats
        yield REQUESTS, {(route, str(status)): n for (route, status), n in stats.ended.items()}
        yield RUNNING, stats.running
        yield WAITING, router.ranks.waiting
        yield RETRIED, router.forwarder.retried
        yield LOST, router.forwarder.lost
        yield BROKEN, router.replies.broken
        yield CUT, router.replies.cut
        yield BYTES_IN, stats.bytes_in
        yield BYTES_OUT, stats.bytes_out
        yield LOOP_LAG, {("router",): router.loop_lag}


def merged(texts: Iterable[str]) -> str:
    """Several expositions as one: each family is described once, with all of its samples.

    Text by text, not parsed: a run of many ranks must not hold up the streams meanwhile.
    """
    heads: dict[str, dict[str, str]] = {}
    samples: dict[str, list[str]] = {}
    for text in texts:
        name = ""
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                what, name = line.split(" ", 3)[1:3]
                heads.setdefault(name, {}).setdefault(what, line)
            elif name and line.startswith(name):
                samples.setdefault(name, []).append(line)
    lines = [
        line for name, head in heads.items() for line in (*head.values(), *samples.get(name, ()))
    ]
    return "".join(f"{line}\n" for line in lines)
