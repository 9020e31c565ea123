"""Routes that name sessions of several ranks in one body, and the poll for whatever is ready."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import orjson
from aiohttp import web

from any_agent.errors import InvalidRequest, ReplyLost, ServiceUnavailable
from router import merge
from router.affinity import SessionAffinity
from router.body import BodyFields, RequestBody, seconds
from router.client_response import ClientResponder
from router.fanout import Handler
from router.forward import Forwarder
from router.open_session import MAX_BYTES
from router.rank_health import RankHealth
from router.upstream import UpstreamResponse

_SLICE = 1.0
"""Seconds for which one rank is polled before the others are looked at again."""
_LONGEST = 300.0
"""Seconds: of a poll, as the ranks have it."""


class LeaseRoute:
    """Each session's part of a request goes to its rank, which is waited for if it restarts.

    What one rank could not do is the answer, although the others did theirs: all of these may be
    asked for again.
    """

    def __init__(
        self,
        affinity: SessionAffinity,
        ranks: RankHealth,
        forwarder: Forwarder,
        replies: ClientResponder,
    ) -> None:
        self._affinity = affinity
        self._ranks = ranks
        self._forwarder = forwarder
        self._replies = replies
        self._turn = 0
        self.routes: dict[tuple[str, str], Handler] = {
            ("POST", "/rl/v1/ack"): self.ack,
            ("POST", "/rl/v1/export_trajectories"): self.export,
            ("POST", "/rl/v1/lease"): self.lease,
        }

    async def ack(self, request: web.BaseRequest, body: RequestBody) -> web.StreamResponse:
        """The acks of all ranks, counted together."""
        said = BodyFields(request, await body.whole(MAX_BYTES))
        trained = merge.split(said.items("trained") or [], self._rank_of)
        rejected = merge.split(said.items("rejected") or [], self._rank_of_rejection)
        if trained is None or rejected is None or not (trained or rejected):
            return await self._forwarder.pass_on(request, None, body, content=said.content)
        parts = {
            rank: said.asking(trained=trained.get(rank, []), rejected=rejected.get(rank, []))
            for rank in sorted({*trained, *rejected})
        }
        answers = await self._each(request, parts)
        refusal = next((answer for answer in answers if answer.status != 200), None)
        if refusal is not None:
            return await self._as_is(request, refusal)
        total = sum(orjson.loads(answer.body)["acked"] for answer in answers)
        return await self._replies.json(request, {"acked": total})

    async def export(self, request: web.BaseRequest, body: RequestBody) -> web.StreamResponse:
        """The trajectories of all ranks, in the order asked for."""
        asked = BodyFields(request, await body.whole(MAX_BYTES))
        ids = asked.items("session_ids")
        by_rank = merge.split(ids, self._rank_of)
        if not by_rank or len(by_rank) == 1:
            rank = next(iter(by_rank)) if by_rank else None
            return await self._forwarder.pass_on(request, rank, body, content=asked.content)
        parts = {rank: asked.asking(session_ids=part) for rank, part in sorted(by_rank.items())}
        answers = await self._each(request, parts)
        refusal = next((answer for answer in answers if answer.status != 200), None)
        if refusal is not None:
            return await self._as_is(request, refusal)
        said = [orjson.loads(answer.body) for answer in answers]
        rows = {id: row for one in said for id, row in one["trajectories"].items()}
        ordered = {id: rows[id] for id in dict.fromkeys(ids or ()) if id in rows}
        return await self._replies.json(request, said[0] | {"trajectories": ordered})

    async def lease(self, request: web.BaseRequest, body: RequestBody) -> web.StreamResponse:
        """Sessions by name from their rank, or whatever is ready at any of them."""
        said = BodyFields(request, await body.whole(MAX_BYTES))
        wait = seconds(said.get("wait", 30.0))
        if said.body is None or wait is None:
            return await self._forwarder.pass_on(request, None, body, content=said.content)
        if (ids := said.items("session_ids")) is not None:
            by_rank = merge.split(ids, self._rank_of) or {}
            if len(by_rank) > 1:
                raise InvalidRequest(
                    f"these sessions live on the ranks {', '.join(map(str, sorted(by_rank)))}; "
                    "lease those of one rank at a time",
                    param="session_ids",
                )
            rank = next(iter(by_rank), None)
            return await self._forwarder.pass_on(request, rank, body, content=said.content)
        answer = await self._poll(request, said, min(wait, _LONGEST))
        return await self._as_is(request, answer)

    async def _poll(
        self, request: web.BaseRequest, said: BodyFields, wait: float
    ) -> UpstreamResponse:
        """The first answer that is more than "nothing yet".

        One rank is asked at a time: of two polls at once the slower one would have to be abandoned,
        and what it was just being handed would be leased to nobody. So one of them waits for a
        moment, then all are looked at again.
        """
        deadline = time.monotonic() + wait
        give_up = time.monotonic() + max(wait, self._ranks.wait)
        while True:
            live = await self._ranks.reach_any(give_up)
            self._turn += 1
            quiet: UpstreamResponse | None = None
            for k in range(len(live)):
                answer = await self._ready(request, said, live[(self._turn + k) % len(live)], 0.0)
                if answer is not None and answer.status != 204:
                    return answer
                quiet = quiet or answer
            if quiet is None:
                # All of them went away.
                continue
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return quiet
            answer = await self._ready(request, said, quiet.rank, min(_SLICE, remaining))
            if answer is not None and answer.status != 204:
                return answer

    async def _ready(
        self, request: web.BaseRequest, said: BodyFields, rank: int, wait: float
    ) -> UpstreamResponse | None:
        """What is ready at a rank; None if it is away."""
        content, target = said.asking(wait=round(wait, 3))
        try:
            return await self._forwarder.ask(request, rank, content=content, target=target)
        except ServiceUnavailable:
            return None
        except ReplyLost:
            # What it had leased, it hands out again.
            self._ranks.failed(rank)
            return None

    async def _each(
        self, request: web.BaseRequest, parts: dict[int, tuple[bytes, str]]
    ) -> list[UpstreamResponse]:
        """Every rank's answer to its part: a body and a target."""
        deadline = time.monotonic() + self._ranks.wait
        asked = [
            asyncio.ensure_future(
                self._forwarder.ask(
                    request, rank, content=content, target=target, deadline=deadline
                )
            )
            for rank, (content, target) in parts.items()
        ]
        try:
            return await asyncio.gather(*asked)
        finally:
            for task in asked:
                task.cancel()

    def _rank_of(self, session_id: Any) -> int | None:
        return self._affinity.rank_of(session_id) if isinstance(session_id, str) else None

    def _rank_of_rejection(self, item: Any) -> int | None:
        return self._rank_of(item.get("session_id")) if isinstance(item, dict) else None

    async def _as_is(
        self, request: web.BaseRequest, answer: UpstreamResponse
    ) -> web.StreamResponse:
        return await self._replies.whole(request, answer.status, answer.headers, answer.body)
