"""Requests sent to ranks: passed on as they came, or asked anew; retried while nothing was sent."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType
from urllib.parse import unquote

from aiohttp import hdrs, web
from multidict import CIMultiDict, istr

from any_agent.auth.access import CLIENT_HEADER
from any_agent.errors import ReplyLost
from any_agent.keys import bearer_of
from router.affinity import SESSION_HEADER
from router.body import RequestBody
from router.client_response import ClientResponder
from router.rank_health import RankHealth
from router.repeats import IDEMPOTENCY_KEY
from router.upstream import NeverSent, Upstream, UpstreamResponse, end_to_end

_CLIENT = istr(CLIENT_HEADER)
_REPEATABLE = ("GET", "HEAD", "OPTIONS")


class Forwarder:
    """Every request to a rank goes through here."""

    def __init__(self, upstream: Upstream, ranks: RankHealth, replies: ClientResponder) -> None:
        self._upstream = upstream
        self._ranks = ranks
        self._replies = replies
        self._turn = 0
        self.retried = 0
        """Requests sent again, since no rank had got them."""
        self.lost = 0
        """Requests whose rank died before it answered."""

    async def pass_on(
        self,
        request: web.BaseRequest,
        rank: int | None,
        body: RequestBody,
        *,
        content: bytes | None = None,
    ) -> web.StreamResponse:
        """Answer as the rank does, or with None as any rank does.

        ``content``: the body to send, if it was read already. A rank that is away is waited for;
        ServiceUnavailable if it does not come, ReplyLost if it dies before it answers.
        """
        headers = outgoing(request)
        if content is not None:
            headers[hdrs.CONTENT_LENGTH] = str(len(content))
        elif not request.body_exists:
            content = b""
        elif body.short:
            content = await body.whole()
        deadline = time.monotonic() + self._ranks.wait
        repeatable = content == b"" and _repeatable(request)
        while True:
            to = rank if rank is not None else await self._next(deadline)
            origin = self._ranks.url(to) or await self._ranks.reach(to, deadline)
            try:
                response = await self._upstream.send(
                    request.method,
                    origin,
                    request.raw_path,
                    headers,
                    body.stream() if content is None else content or None,
                )
                break
            except NeverSent:
                self.retried += 1
                self._ranks.failed(to)
            except ReplyLost:
                if body.error is not None:
                    raise body.error from None
                self.lost += 1
                if not repeatable:
                    raise
                # Once: if the rank has died, it is waited for now.
                repeatable = False
        async with response:
            try:
                return await self._replies.relay(request, response)
            except ReplyLost:
                self.lost += 1
                raise

    async def ask(
        self,
        request: web.BaseRequest,
        rank: int,
        *,
        content: bytes | None = None,
        target: str | None = None,
        deadline: float = 0.0,
        more: Mapping[str, str] = MappingProxyType({}),
    ) -> UpstreamResponse:
        """A rank's whole answer to this request with another body or target, or ``more`` headers.

        Until the deadline a rank that is away is waited for. Errors as for `pass_on`.
        """
        headers = outgoing(request)
        # The answer is read here.
        headers.popall(hdrs.ACCEPT_ENCODING, None)
        headers.popall(hdrs.CONTENT_LENGTH, None)
        # What is asked anew concerns no one session, and other ranks would not know it.
        headers.popall(SESSION_HEADER, None)
        headers.update(more)
        if content is not None:
            headers[hdrs.CONTENT_LENGTH] = str(len(content))
        return await self._exchange(
            rank, request.method, target or request.raw_path, headers, content, deadline
        )

    async def tell(
        self, rank: int, target: str, content: bytes, key: str, *, once: str
    ) -> UpstreamResponse:
        """A rank's answer to a POST of the router's own; ``once`` is its idempotency key.

        Errors as for `pass_on`.
        """
        headers = CIMultiDict({hdrs.AUTHORIZATION: f"Bearer {key}", IDEMPOTENCY_KEY: once})
        headers[hdrs.CONTENT_LENGTH] = str(len(content))
        return await self._exchange(rank, "POST", target, headers, content, 0.0)

    async def _exchange(
        self,
        rank: int,
        method: str,
        target: str,
        headers: CIMultiDict[str],
        content: bytes | None,
        deadline: float,
    ) -> UpstreamResponse:
        while True:
            origin = self._ranks.url(rank) or await self._ranks.reach(rank, deadline)
            try:
                return await self._upstream.exchange(rank, method, origin, target, headers, content)
            except NeverSent:
                self.retried += 1
                self._ranks.failed(rank)
            except ReplyLost:
                self.lost += 1
                raise

    async def _next(self, deadline: float) -> int:
        """The next of the ranks that serve, in turn."""
        live = self._ranks.live or await self._ranks.reach_any(deadline)
        self._turn += 1
        return live[self._turn % len(live)]


def outgoing(request: web.BaseRequest) -> CIMultiDict[str]:
    """The request's headers for a rank."""
    headers = end_to_end(request.headers)
    headers.popall(hdrs.EXPECT, None)
    headers[_CLIENT] = request.remote or ""
    keys = headers.getall(hdrs.AUTHORIZATION, [])
    if len(keys) > 1:
        # But for empty ones they are the same key, or mean nothing behind a path prefix.
        headers[hdrs.AUTHORIZATION] = next((key for key in keys if bearer_of([key], ())), keys[0])
    return headers


def _repeatable(request: web.BaseRequest) -> bool:
    """Whether doing it twice changes nothing."""
    return request.method in _REPEATABLE and "start_session" not in unquote(request.raw_path)
