"""The operator's and the trainer's routes over all ranks: reads are merged, writes go to all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any
from urllib.parse import parse_qsl

import orjson
from aiohttp import web

from any_agent.errors import AnyAgentError, ServiceUnavailable
from any_agent.protocol.rl import AFTER_HEADER, UNREACHABLE_HEADER, read_places, write_places
from router import merge
from router.body import RequestBody
from router.client_response import ClientResponder
from router.forward import Forwarder
from router.open_session import MAX_BYTES
from router.rank_health import RankHealth
from router.upstream import UpstreamResponse

_READ_TIMEOUT = 10.0
_WRITE_TIMEOUT = 60.0
"""More than a rank's own patience with its engine."""

Handler = Callable[[web.BaseRequest, RequestBody], Awaitable[web.StreamResponse]]


class FanOut:
    """Routes that concern every rank. A rank that is away is not waited for, but named."""

    def __init__(self, ranks: RankHealth, forwarder: Forwarder, replies: ClientResponder) -> None:
        self._ranks = ranks
        self._forwarder = forwarder
        self._replies = replies
        by_version = self._merged(merge.lowest_version)
        self.routes: dict[tuple[str, str], Handler] = {
            ("GET", "/rl/v1/sessions"): self.sessions,
            ("GET", "/rl/v1/capacity"): self._merged(merge.sums),
            ("PUT", "/rl/v1/capacity"): self._merged(merge.sums),
            ("GET", "/rl/v1/run"): by_version,
            ("PUT", "/rl/v1/run"): by_version,
            ("GET", "/rl/v1/version"): by_version,
            ("POST", "/rl/v1/version"): by_version,
            ("POST", "/rl/v1/pause"): by_version,
            ("POST", "/rl/v1/resume"): by_version,
        }

    def _merged(self, one: Callable[[merge.Answers], dict[str, Any]]) -> Handler:
        """All ranks' answers as one, beside each of them."""

        async def handler(request: web.BaseRequest, body: RequestBody) -> web.StreamResponse:
            answers = await self._all(request, await body.whole(MAX_BYTES))
            refusal = _refusal(answers)
            if refusal is not None:
                return await self._as_is(request, refusal)
            said = _said(answers)
            each = {str(rank): _parsed(answer) for rank, answer in sorted(answers.items())}
            data = {**one(said), "ranks": each, "unreachable": self._missing(said)}
            return await self._replies.json(request, data)

        return handler

    async def sessions(self, request: web.BaseRequest, body: RequestBody) -> web.StreamResponse:
        """A list, as one rank's is; the ranks that are missing in it stand in a header."""
        answers = await self._all(request, b"")
        refusal = _refusal(answers)
        if refusal is not None:
            return await self._as_is(request, refusal)
        said = _said(answers)
        query = dict(parse_qsl(request.raw_path.partition("?")[2]))
        missing = self._missing(said)
        headers = {UNREACHABLE_HEADER: ",".join(map(str, missing))} if missing else {}
        found, places = merge.newest(
            said,
            {rank: _end(answers[rank]) for rank in said},
            read_places(query.get("after", "")),
            # The ranks took it for a whole number, and 5.0 is one.
            int(float(query.get("limit", 100))),
        )
        if places is not None:
            headers[AFTER_HEADER] = write_places(places)
        return await self._replies.json(request, found, headers=headers)

    async def _all(self, request: web.BaseRequest, content: bytes) -> dict[int, UpstreamResponse]:
        """What each rank answers; ServiceUnavailable if none does."""
        asked = [self._one(request, rank, content) for rank in self._ranks.live]
        answers = {a.rank: a for a in await asyncio.gather(*asked) if a is not None}
        if not answers:
            raise ServiceUnavailable("no rank of the service is up; try again", retry_after=2)
        return answers

    async def _one(
        self, request: web.BaseRequest, rank: int, content: bytes
    ) -> UpstreamResponse | None:
        limit = _READ_TIMEOUT if request.method == "GET" else _WRITE_TIMEOUT
        try:
            async with asyncio.timeout(limit):
                return await self._forwarder.ask(request, rank, content=content or None)
        except (AnyAgentError, TimeoutError):
            return None

    def _missing(self, said: Iterable[int]) -> list[int]:
        return sorted(set(range(self._ranks.count)) - set(said))

    async def _as_is(
        self, request: web.BaseRequest, answer: UpstreamResponse
    ) -> web.StreamResponse:
        return await self._replies.whole(request, answer.status, answer.headers, answer.body)


def _said(answers: dict[int, UpstreamResponse]) -> merge.Answers:
    """The JSON of the ranks that did what was asked."""
    return {rank: _parsed(answer) for rank, answer in answers.items() if answer.status < 300}


def _parsed(answer: UpstreamResponse) -> Any:
    """Its JSON. What fails below a rank's own error handling is a line of text."""
    try:
        return orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        return answer.body.decode(errors="replace")


def _end(answer: UpstreamResponse) -> int | None:
    """Where a rank's list goes on; None if it does not."""
    return read_places(answer.headers.get(AFTER_HEADER, "")).get(answer.rank)


def _refusal(answers: dict[int, UpstreamResponse]) -> UpstreamResponse | None:
    """What is answered as it is: a rank's 4xx, or an error where no rank succeeded."""
    in_order = [answers[rank] for rank in sorted(answers)]
    for answer in in_order:
        if 400 <= answer.status < 500:
            return answer
    return in_order[0] if all(answer.status >= 300 for answer in in_order) else None
