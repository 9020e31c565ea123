"""Requests to ranks: passed on as they came, or sent with another body; repeated while unsent."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from types import MappingProxyType
from typing import TypeVar
from urllib.parse import unquote

from aiohttp import hdrs, web
from multidict import CIMultiDict, istr

from any_agent.auth.access import CLIENT_HEADER
from any_agent.errors import Draining, ReplyLost, ServiceUnavailable, from_response
from any_agent.keys import KeySigner, bearer_of
from any_agent.protocol import rl
from any_agent.protocol.rl import FLEET_HEADER
from router.affinity import SESSION_HEADER
from router.body import RequestBody
from router.client_response import ClientResponder
from router.rank_health import RankHealth
from router.upstream import Body, NeverSent, RankResponse, Upstream, UpstreamResponse, end_to_end

IDEMPOTENCY_KEY = istr(rl.IDEMPOTENCY_KEY)
_RETRY_COUNT = istr("x-stainless-retry-count")
"""The header by which an SDK marks its retries; a retried model call is not sampled again."""
_CLIENT = istr(CLIENT_HEADER)
_FLEET = istr(FLEET_HEADER)
_MAX_CHOICES = 8  # of a rank, if each time the fleet has changed
_Answer = TypeVar("_Answer", web.StreamResponse | UpstreamResponse, UpstreamResponse)
_REPEATABLE = ("GET", "HEAD", "OPTIONS")


class Forwarder:
    """Sends requests to ranks, and their answers to clients."""

    def __init__(
        self,
        upstream: Upstream,
        ranks: RankHealth,
        replies: ClientResponder,
        signer: KeySigner,
    ) -> None:
        """``signer`` signs the clients' addresses."""
        self._upstream = upstream
        self._signer = signer
        self.ranks = ranks
        self.replies = replies
        self._turn = 0
        self.retried = 0
        """Number of times that a request was sent again because no rank had received it."""
        self.lost = 0
        """Number of requests whose rank died before it answered."""

    async def pass_on(
        self,
        request: web.BaseRequest,
        rank: int | None,
        body: RequestBody,
        *,
        content: bytes | None = None,
    ) -> web.StreamResponse:
        """Pass a request on to a rank, or with None to any, and its answer back.

        ``content``: the body, if it was read already. The rank is waited for while it is away:
        ServiceUnavailable if it does not come back, ReplyLost if it dies before it answers.
        """
        answer = await self._pass_on(request, rank, body, content, {})
        assert isinstance(answer, web.StreamResponse)
        return answer

    async def pass_to_homes(
        self,
        request: web.BaseRequest,
        homes: Callable[[], Sequence[int]],
        body: RequestBody,
        content: bytes,
    ) -> web.StreamResponse:
        """Pass a request on to one of its homes, as :meth:`ask_homes` finds it."""
        answer: web.StreamResponse | UpstreamResponse = await self.ask_homes(
            homes, lambda rank, more: self._pass_on(request, rank, body, content, more)
        )
        assert isinstance(answer, web.StreamResponse)
        return answer

    async def _pass_on(
        self,
        request: web.BaseRequest,
        rank: int | None,
        body: RequestBody,
        content: bytes | None,
        more: Mapping[str, str],
    ) -> web.StreamResponse | UpstreamResponse:
        """Pass a request on, with ``more`` headers; a refusal because of them is only returned."""
        headers = self._rank_headers(request)
        headers.update(more)
        content = await body.to_send(headers, content)
        deadline = time.monotonic() + self.ranks.wait
        repeatable = content == b"" and _is_repeatable(request)
        payload = body.stream if content is None else (lambda: content or None)
        while True:
            response = None
            try:
                response = await self._send(
                    rank, request.method, request.raw_path, headers, payload, deadline
                )
                async with response:
                    if more and response.status == HTTPStatus.MISDIRECTED_REQUEST:
                        refusal, rank = await response.read(), rank or 0
                        return UpstreamResponse(rank, response.status, CIMultiDict(), refusal)
                    return await self.replies.relay(request, response)
            except ReplyLost:
                if response is None and body.error is not None:
                    raise body.error from None
                self.lost += 1
                if response is not None or not repeatable:
                    raise
                # Try once more: if the rank has died, this waits for it.
                repeatable = False

    async def ask(
        self,
        request: web.BaseRequest,
        rank: int,
        *,
        content: bytes = b"",
        target: str | None = None,
        deadline: float = 0.0,
        more: Mapping[str, str] = MappingProxyType({}),
    ) -> UpstreamResponse:
        """Return a rank's whole answer to this request with other contents, or ``more`` headers.

        Wait until the deadline for a rank that is away. Errors as for `pass_on`.
        """
        headers = self._rank_headers(request)
        # The answer is parsed here, so it must not be compressed.
        headers.popall(hdrs.ACCEPT_ENCODING, None)
        headers.popall(hdrs.CONTENT_LENGTH, None)
        headers.popall(hdrs.CONTENT_ENCODING, None)
        # The new request concerns no single session, and other ranks would not know the one named.
        headers.popall(SESSION_HEADER, None)
        headers.update(more)
        target = target or request.raw_path
        return await self.exchange(rank, request.method, target, headers, content, deadline)

    async def ask_homes(
        self,
        homes: Callable[[], Sequence[int]],
        ask: Callable[[int, Mapping[str, str]], Awaitable[_Answer]],
    ) -> _Answer:
        """Return the answer of the rank that has what a request belongs to, or may begin it.

        ``homes`` are the ranks that may, the one where it begins last; ``ask`` sends one of them
        the request with these headers. They are chosen again when the fleet has changed.
        """
        for _ in range(_MAX_CHOICES):
            number = self.ranks.fleet.number
            *earlier, home = homes()
            for rank in earlier:
                answer = await ask(rank, {FLEET_HEADER: f"{number} member"})
                if answer.status != HTTPStatus.MISDIRECTED_REQUEST:
                    return answer
            answer = await ask(home, {FLEET_HEADER: str(number)})
            misdirected = answer.status == HTTPStatus.MISDIRECTED_REQUEST
            if not (misdirected or _drains(answer)):
                return answer
            await self.ranks.refresh()
            if self.ranks.fleet.number == number:
                break
        if not misdirected:
            return answer
        raise ServiceUnavailable("the service's ranks change just now; try again", retry_after=1)

    async def answer_with(
        self, request: web.BaseRequest, answer: UpstreamResponse
    ) -> web.StreamResponse:
        """Send a rank's answer to the client as it is."""
        return await self.replies.send(request, answer.status, answer.headers, answer.body)

    async def exchange(
        self,
        rank: int,
        method: str,
        target: str,
        headers: CIMultiDict[str],
        content: bytes,
        deadline: float = 0.0,
    ) -> UpstreamResponse:
        """Send a rank a request with these contents; return its whole answer.

        Wait until the deadline for a rank that is away. Errors as for `pass_on`.
        """
        if content:
            headers[hdrs.CONTENT_LENGTH] = str(len(content))
        try:
            async with await self._send(
                rank, method, target, headers, lambda: content or None, deadline
            ) as response:
                body = await response.read()
                return UpstreamResponse(rank, response.status, end_to_end(response.headers), body)
        except ReplyLost:
            self.lost += 1
            raise

    async def _send(
        self,
        rank: int | None,
        method: str,
        target: str,
        headers: CIMultiDict[str],
        payload: Callable[[], Body],
        deadline: float,
    ) -> RankResponse:
        """Send a request until a rank has received it, and return the beginning of its answer."""
        while True:
            to = rank if rank is not None else await self._next_rank(deadline)
            origin = self.ranks.url(to) or await self.ranks.reach(to, deadline)
            try:
                return await self._upstream.send(method, origin, target, headers, payload())
            except NeverSent:
                self.retried += 1
                self.ranks.mark_failed(to)

    def _rank_headers(self, request: web.BaseRequest) -> CIMultiDict[str]:
        """Return the headers with which a rank gets a client's request."""
        headers = end_to_end(request.headers)
        headers.popall(hdrs.EXPECT, None)
        headers.popall(_FLEET, None)
        headers[_CLIENT] = self._signer.sign_client(request.remote or "")
        keys = headers.getall(hdrs.AUTHORIZATION, [])
        if len(keys) > 1:
            # Except for empty ones they are the same key, or mean nothing behind a path prefix.
            named = next((key for key in keys if bearer_of([key], ())), keys[0])
            headers[hdrs.AUTHORIZATION] = named
        return headers

    async def _next_rank(self, deadline: float) -> int:
        live = self.ranks.fit or await self.ranks.reach_any(deadline)
        self._turn += 1
        return live[self._turn % len(live)]


def _drains(answer: web.StreamResponse | UpstreamResponse) -> bool:
    """Return whether a rank refused to begin anything: it stops, or leaves the fleet."""
    if not isinstance(answer, UpstreamResponse):
        return False
    refused = answer.status == HTTPStatus.SERVICE_UNAVAILABLE
    return refused and isinstance(from_response(answer.status, answer.body, None), Draining)


def _is_repeatable(request: web.BaseRequest) -> bool:
    """Return whether sending the request twice has no second effect."""
    return request.method in _REPEATABLE and "start_session" not in unquote(request.raw_path)


def is_idempotent(request: web.BaseRequest) -> bool:
    """Return whether a client may repeat a POST or DELETE whose answer was lost.

    Its rank then does once what the equal requests ask for.
    """
    if request.method not in ("POST", "DELETE"):
        return False
    path = request.raw_path
    if "/rl/" in path or path.startswith("/grant_capacity"):
        return IDEMPOTENCY_KEY in request.headers
    return _RETRY_COUNT in request.headers
