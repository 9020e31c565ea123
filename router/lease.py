"""Routes whose bodies name sessions of several ranks, and the poll for closed groups."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import orjson
from aiohttp import web

from any_agent.errors import InvalidRequest, ReplyLost, ServiceUnavailable
from router.affinity import SessionAffinity
from router.body import BodyFields, RequestBody, seconds
from router.fanout import Handler
from router.forward import Forwarder
from router.open_session import MAX_BYTES
from router.upstream import UpstreamResponse

SLICE = 1.0  # seconds for which one rank is polled before the others are asked again
_MAX_WAIT = 300.0  # seconds of a poll, as the ranks have it


class LeaseRoute:
    """Sends each session's part of a request to its rank, and waits for one that restarts.

    A rank's refusal is the answer, although the other ranks did their parts: the same request can
    be sent again.
    """

    def __init__(self, affinity: SessionAffinity, forwarder: Forwarder) -> None:
        self._affinity = affinity
        self._ranks = forwarder.ranks
        self._forwarder = forwarder
        self._turn = 0
        self.routes: dict[tuple[str, str], Handler] = {
            ("POST", "/rl/v1/ack"): self.ack,
            ("POST", "/rl/v1/export_trajectories"): self.export,
            ("POST", "/rl/v1/lease"): self.lease,
        }

    async def ack(self, request: web.BaseRequest, body: RequestBody) -> web.StreamResponse:
        """Answer with the number of acknowledged sessions of all ranks."""
        fields = BodyFields(request, await body.read(MAX_BYTES))
        trained = split(fields.items("trained") or [], self._rank_of)
        rejected = split(fields.items("rejected") or [], self._rank_of_rejection)
        if trained is None or rejected is None or not (trained or rejected):
            return await self._forwarder.pass_on(request, None, body, content=fields.content)
        parts = {
            rank: fields.changed(trained=trained.get(rank, []), rejected=rejected.get(rank, []))
            for rank in sorted({*trained, *rejected})
        }
        return await self._answer(
            request, parts, lambda found: {"acked": sum(each["acked"] for each in found)}
        )

    async def export(self, request: web.BaseRequest, body: RequestBody) -> web.StreamResponse:
        """Answer with the trajectories of all ranks, in the order of the request."""
        fields = BodyFields(request, await body.read(MAX_BYTES))
        ids = fields.items("session_ids")
        by_rank = split(ids, self._rank_of)
        if not by_rank or len(by_rank) == 1:
            rank = next(iter(by_rank)) if by_rank else None
            return await self._forwarder.pass_on(request, rank, body, content=fields.content)

        def merge(found: list[Any]) -> dict[str, Any]:
            rows = {id: row for each in found for id, row in each["trajectories"].items()}
            ordered = {id: rows[id] for id in dict.fromkeys(ids or ()) if id in rows}
            return {**found[0], "trajectories": ordered}

        parts = {rank: fields.changed(session_ids=part) for rank, part in sorted(by_rank.items())}
        return await self._answer(request, parts, merge)

    async def lease(self, request: web.BaseRequest, body: RequestBody) -> web.StreamResponse:
        """Lease sessions by name from their rank, or groups that are ready at any rank."""
        fields = BodyFields(request, await body.read(MAX_BYTES))
        wait = seconds(fields.get("wait", 30.0))
        if fields.body is None or wait is None:
            return await self._forwarder.pass_on(request, None, body, content=fields.content)
        if (ids := fields.items("session_ids")) is not None:
            by_rank = split(ids, self._rank_of) or {}
            if len(by_rank) > 1:
                raise InvalidRequest(
                    f"these sessions live on the ranks {', '.join(map(str, sorted(by_rank)))}; "
                    "lease those of one rank at a time",
                    param="session_ids",
                )
            rank = next(iter(by_rank), None)
            return await self._forwarder.pass_on(request, rank, body, content=fields.content)
        answer = await self._poll(request, fields, min(wait, _MAX_WAIT))
        return await self._forwarder.answer_with(request, answer)

    async def _poll(
        self, request: web.BaseRequest, fields: BodyFields, wait: float
    ) -> UpstreamResponse:
        """Return the first answer that is not empty, or an empty one at the end of the wait.

        One rank is asked at a time: of two concurrent polls the slower one would have to be
        abandoned, and the groups that it was just given would be leased to nobody. So one poll
        waits for a moment, then all ranks are asked again.
        """
        deadline = time.monotonic() + wait
        give_up = time.monotonic() + max(wait, self._ranks.wait)
        while True:
            live = await self._ranks.reach_any(give_up)
            self._turn += 1
            quiet: UpstreamResponse | None = None
            for k in range(len(live)):
                rank = live[(self._turn + k) % len(live)]
                answer = await self._poll_rank(request, fields, rank, 0.0)
                if answer is not None and answer.status != 204:
                    return answer
                quiet = quiet or answer
            if quiet is None:
                # All ranks went away.
                continue
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return quiet
            answer = await self._poll_rank(request, fields, quiet.rank, min(SLICE, remaining))
            if answer is not None and answer.status != 204:
                return answer

    async def _poll_rank(
        self, request: web.BaseRequest, fields: BodyFields, rank: int, wait: float
    ) -> UpstreamResponse | None:
        """Return a rank's answer to a poll; None if it is away."""
        content, target = fields.changed(wait=round(wait, 3))
        try:
            return await self._forwarder.ask(request, rank, content=content, target=target)
        except ServiceUnavailable:
            return None
        except ReplyLost:
            # The rank leases what it had leased in the lost answer once more.
            self._ranks.mark_failed(rank)
            return None

    async def _answer(
        self,
        request: web.BaseRequest,
        parts: dict[int, tuple[bytes, str]],
        merge: Callable[[list[Any]], dict[str, Any]],
    ) -> web.StreamResponse:
        """Send each rank its part, a body and a target; answer with the merged answers."""
        deadline = time.monotonic() + self._ranks.wait
        tasks = [
            asyncio.ensure_future(
                self._forwarder.ask(
                    request, rank, content=content, target=target, deadline=deadline
                )
            )
            for rank, (content, target) in parts.items()
        ]
        try:
            answers = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        refusal = next((answer for answer in answers if answer.status != 200), None)
        if refusal is not None:
            return await self._forwarder.answer_with(request, refusal)
        data = merge([orjson.loads(answer.body) for answer in answers])
        return await self._forwarder.replies.json(request, data)

    def _rank_of(self, session_id: Any) -> int | None:
        return self._affinity.rank_of(session_id) if isinstance(session_id, str) else None

    def _rank_of_rejection(self, item: Any) -> int | None:
        return self._rank_of(item.get("session_id")) if isinstance(item, dict) else None


def split(items: Any, rank_of: Callable[[Any], int | None]) -> dict[int, list[Any]] | None:
    """Return a list's items by rank, in their order; None unless it is a list and all have one."""
    if not isinstance(items, list):
        return None
    out: dict[int, list[Any]] = {}
    for item in items:
        rank = rank_of(item)
        if rank is None:
            return None
        out.setdefault(rank, []).append(item)
    return out
